"""Numbers of keys and values as the cache holds them: of another type than they are computed in, or of a byte with scales."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


def to_cache_type(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of ``dtype``. What is beyond its range becomes its largest number: an infinity, multiplied and
    masked, would vanish unseen. NaN stays NaN."""
    if heads.dtype is dtype:
        return heads
    limits = torch.finfo(dtype)
    return heads.float().clamp(limits.min, limits.max).to(dtype)


def quantize(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of ``dtype``, int8 or float8_e4m3fn, with a scale for each head: its largest magnitude over the type's largest
    number. The native kernels store the same integers.

    heads [..., head_dim] → ``dtype`` [..., head_dim], float32 [...]. A head with NaN or infinity has such a scale, and so reads
    as NaN.
    """
    exact = heads.float()
    largest = _LARGEST[dtype]
    scales = exact.abs().amax(-1) / largest
    divisors = torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    quotients = exact / divisors
    if dtype is torch.int8:
        quotients = quotients.round_()
    return quotients.clamp_(-largest, largest).nan_to_num_(0.0).to(dtype), scales


def dequantize(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The other way: [..., head_dim], float32 [...] → ``dtype`` [..., head_dim], multiplied in float32."""
    return numbers.float().mul_(scales.unsqueeze(-1)).to(dtype)
