"""The rotary embedding of a step. Source: Su et al. 2021 (arXiv:2104.09864), here with the two halves of a head rotated against
each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Cosine and sine of the angle by which each token's pairs of dimensions turn, times what the model scales them with."""

    cos: Tensor  # [num_tokens, head_dim / 2], float32
    sin: Tensor  # [num_tokens, head_dim / 2], float32

    def copy_(self, other: Rotation) -> None:
        """Take over the numbers of ``other``, which may be of fewer tokens, in place."""
        self.cos[: len(other.cos)] = other.cos
        self.sin[: len(other.sin)] = other.sin

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate in float32. heads [num_tokens, num_heads, head_dim] → the same shape and type."""
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        first, second = heads.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
