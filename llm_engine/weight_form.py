"""The forms in which the native kernels read a weight matrix. Needs no torch, so that a server can count them beforehand."""

from __future__ import annotations

from enum import StrEnum

GROUP_SIZE = 32
"""Inputs that share a scale and a zero."""


class WeightForm(StrEnum):
    """How a weight is stored. A quantised one is scale * q + zero, with q from 0 to 15 (INT4) or from -128 to 127 (INT8)."""

    INT4 = "int4"
    INT8 = "int8"
    BFLOAT16 = "bfloat16"

    @property
    def num_bits(self) -> int:
        """Of one weight, without its share of scale and zero."""
        return {WeightForm.INT4: 4, WeightForm.INT8: 8, WeightForm.BFLOAT16: 16}[self]

    @property
    def is_quantized(self) -> bool:
        return self is not WeightForm.BFLOAT16

    def holds(self, other: WeightForm) -> bool:
        """Whether all that ``other`` can say can be said in this form."""
        return self.num_bits >= other.num_bits
