"""A product with a weight matrix. Every such product of the model goes through here, whatever form the matrix has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from llm_engine.native.library import NativeLibrary
    from llm_engine.native.packed_weight import PackedWeight


class Projection(Protocol):
    """A matrix [num_out, num_in] to multiply with, and what is added to the product."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_rows, num_in] → [num_rows, num_out], of the same type or float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """``weight`` [num_out, num_in], ``bias`` [num_out] or None in models that have none there."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """``weight`` as the native kernels read it, ``bias`` [num_out], float32, or None. Each row's result depends on that row
    alone, however many there are. It is ``out_dtype``: bfloat16, or float32 where nothing shall be rounded."""

    weight: PackedWeight
    bias: Tensor | None
    library: NativeLibrary
    out_dtype: torch.dtype = torch.bfloat16

    def __call__(self, x: Tensor) -> Tensor:
        return self.library.linear(x, self.weight, self.bias, self.out_dtype)
