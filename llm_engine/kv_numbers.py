"""Numbers of keys and values as the cache holds them: of another type than they are computed in, or integers with scales."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_INT8 = 127


def to_cache_type(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of ``dtype``. What is beyond its range becomes its largest number: an infinity, multiplied and
    masked, would vanish unseen. NaN stays NaN."""
    if heads.dtype is dtype:
        return heads
    limits = torch.finfo(dtype)
    return heads.float().clamp(limits.min, limits.max).to(dtype)


def quantize(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Integers with a scale for each head: its largest magnitude / 127. The native kernels store the same bits.

    heads [..., head_dim] → int8 [..., head_dim], float32 [...]. A head with NaN or infinity has such a scale, and so reads as
    NaN.
    """
    exact = heads.float()
    scales = exact.abs().amax(-1) / _MAX_INT8
    divisors = torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    integers = (exact / divisors).round_().clamp_(-_MAX_INT8, _MAX_INT8).nan_to_num_(0.0)
    return integers.to(torch.int8), scales


def dequantize(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The other way: int8 [..., head_dim], float32 [...] → ``dtype`` [..., head_dim], multiplied in float32."""
    return integers.float().mul_(scales.unsqueeze(-1)).to(dtype)
