"""A product with a weight matrix. Every such product of the model goes through here."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """``weight`` [num_out, num_in], ``bias`` [num_out] or None in models that have none there."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_rows, num_in] → [num_rows, num_out]."""
        return functional.linear(x, self.weight, self.bias)
