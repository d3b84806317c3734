"""How a model's rotary embedding was stretched to a longer window than it was first trained for. Values only, no arithmetic.

Sources: Chen et al. 2023 (arXiv:2306.15595), linear; Peng et al. 2023 (arXiv:2309.00071), YaRN; Llama 3.1's model card.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every position is divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Waves longer than ``original_window / low_freq_factor`` tokens are stretched by ``factor``, those shorter than
    ``original_window / high_freq_factor`` are kept, those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Waves that turn more than ``beta_fast`` times in ``original_window`` tokens are kept, those that turn less than
    ``beta_slow`` times are stretched by ``factor``, those between are blended. ``attention_factor`` multiplies the rotated
    queries and keys. ``is_rounded``: the ends of the blend lie on whole dimensions.
    """

    factor: float
    original_window: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    is_rounded: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
