"""Where the tokens of a decode step find their keys and values in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepPlaces:
    """For each token of a step, in tensors that the native kernels read. ``page_ids`` holds the page tables of all rows, one
    after another."""

    page_ids: Tensor  # [num_pages of all rows], int32
    tables: Tensor  # [num_tokens], int32: where in page_ids the token's page table begins
    num_keys: Tensor  # [num_tokens], int32: keys up to the token, itself among them
