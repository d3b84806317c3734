"""The angle by which each pair of dimensions turns from one position to the next, plain or scaled. In float32 throughout, as
the models were trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llm_engine.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


def rope_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> Tensor:
    """Radians a position, [head_dim / 2], float32."""
    waves = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)  # [head_dim / 2]
    plain = 1.0 / waves
    match scaling:
        case None:
            return plain
        case LinearScaling():
            return plain / scaling.factor
        case Llama3Scaling():
            return _llama3(plain, scaling)
        case YarnScaling():
            return torch.lerp(plain, 1.0 / (scaling.factor * waves), _yarn_stretch(theta, head_dim, scaling))


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    num_turns = scaling.original_window * plain / (2 * math.pi)  # [head_dim / 2], in the original window
    kept = (num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn_stretch(theta: float, head_dim: int, scaling: YarnScaling) -> Tensor:
    """How far each pair of dimensions is stretched, 0 (kept) to 1 (by the whole factor). [head_dim / 2]."""

    def dimension_that_turns(num_turns: float) -> float:
        return head_dim * math.log(scaling.original_window / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension_that_turns(scaling.beta_fast), dimension_that_turns(scaling.beta_slow)
    if scaling.is_rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return ((torch.arange(head_dim // 2).float() - first) / width).clamp(0, 1)
