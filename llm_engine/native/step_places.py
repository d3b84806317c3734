"""Where the tokens of a decode step find their keys and values in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepPlaces:
    """For each token of a step, in tensors that the native kernels read. ``page_ids`` holds the page tables of all rows, one
    after another."""

    page_ids: Tensor  # [num_pages of all rows], int32
    tables: Tensor  # [num_tokens], int32: where in page_ids the token's page table begins
    num_keys: Tensor  # [num_tokens], int32: keys up to the token, itself among them

    @classmethod
    def empty(cls, *, max_tokens: int, max_pages: int) -> StepPlaces:
        """Room for ``copy_``."""
        tables, num_keys = torch.empty(2, max_tokens, dtype=torch.int32)
        return cls(page_ids=torch.empty(max_pages, dtype=torch.int32), tables=tables, num_keys=num_keys)

    def copy_(self, other: StepPlaces) -> None:
        """Take over the numbers of ``other``, in place."""
        self.page_ids[: len(other.page_ids)] = other.page_ids
        self.tables[: len(other.tables)] = other.tables
        self.num_keys[: len(other.num_keys)] = other.num_keys
