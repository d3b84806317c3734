"""Root-mean-square norm. Source: Zhang and Sennrich 2019 (arXiv:1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llm_engine.native.library import NativeLibrary


class Norm(Protocol):
    """A norm of the last dimension, whose result has the type of the activations."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_rows, size] or, head by head, [num_tokens, num_heads, size] → the same shape."""

    def of_sum(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of both, of the type of ``x``, or ``x`` alone, and the norm of that. All [num_rows, size]. The sum may lie
        where ``x`` lay."""


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """``weight`` [size] is float32 whatever the type of the model, since some models keep it near 1 and mean the difference."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)

    def of_sum(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        if delta is not None:
            x = x + delta
        return x, self(x)


@dataclass(frozen=True, slots=True, eq=False)
class NativeRmsNorm:
    """The same on the native kernels; results are bfloat16. ``of_sum`` adds to ``x``, float32, in place: rounding the sum after
    each layer would be half of all that rounding does to the logits."""

    weight: Tensor
    eps: float
    library: NativeLibrary

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            return self.library.add_rms_norm(x, None, self.weight, self.eps)
        return self.library.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        return x, self.library.add_rms_norm(x, delta, self.weight, self.eps)
