"""Where a step's tokens put their keys and values in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CacheSlots:
    """For each token of a step, its place in its layer, in elements from the first page's."""

    slots: Tensor  # [num_tokens], int64
    scale_slots: Tensor | None  # [num_tokens], int64: the same for the scales of a cache that has them
