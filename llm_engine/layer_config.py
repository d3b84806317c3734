"""What may differ between the layers of one model: rotary embedding, window, kind of feed-forward. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.rope_scaling import RopeScaling

MIN_ROPE_THETA = 2.0
"""Near 1 all dimensions turn alike, and YaRN divides by the logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding: ``theta``, at least ``MIN_ROPE_THETA``, to the power of 0 to 1 is how many positions a dimension
    takes for a radian."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer. Without ``rope`` its attention knows no positions. With ``sliding_window`` a token attends to that many
    tokens, itself among them, else to all before it. ``has_experts``: its feed-forward is a mixture of experts.
    """

    rope: Rope | None
    sliding_window: int | None = None
    has_experts: bool = False
