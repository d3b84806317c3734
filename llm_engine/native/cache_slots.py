"""Where a step's tokens put their keys and values in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CacheSlots:
    """For each token of a step, its place in its layer, in elements from the first page's."""

    slots: Tensor  # [num_tokens], int64
    scale_slots: Tensor | None  # [num_tokens], int64: the same for the scales of a cache that has them

    @classmethod
    def empty(cls, *, max_tokens: int, has_scales: bool) -> CacheSlots:
        """Room for ``copy_``."""
        slots, scale_slots = torch.empty(2, max_tokens, dtype=torch.int64)
        return cls(slots=slots, scale_slots=scale_slots if has_scales else None)

    def copy_(self, other: CacheSlots) -> None:
        """Take over the numbers of ``other``, in place."""
        self.slots[: len(other.slots)] = other.slots
        if self.scale_slots is not None:
            assert other.scale_slots is not None
            self.scale_slots[: len(other.scale_slots)] = other.scale_slots
