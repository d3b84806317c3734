"""Root-mean-square norm. Source: Zhang and Sennrich 2019 (arXiv:1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """``weight`` [size] is float32 whatever the type of the model, since some models keep it near 1 and mean the difference."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Norm the last dimension, [..., size], in float32; the result has the type of ``x``."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)
