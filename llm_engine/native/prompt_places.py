"""Where the rows of a prefill step find their keys and values in the paged cache, and room to bring them in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

KEY_MULTIPLE = 32
"""A row's keys are packed in groups of so many."""

DIM_MULTIPLE = 32
"""The width of a head is padded to a multiple of this when keys and values are packed."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PromptPlaces:
    """For each row of a step, in tensors that the native kernels read. ``page_ids`` holds the page tables of all rows, one
    after another. ``packed`` is used anew in every layer."""

    page_ids: Tensor  # [num_pages of all rows], int32
    tables: Tensor  # [num_rows], int32: where in page_ids the row's page table begins
    first_tokens: Tensor  # [num_rows + 1], int32: where in the step the row begins, at last the number of all tokens
    num_keys: Tensor  # [num_rows], int32: keys up to the row's last token, itself among them
    packed: Tensor  # [num_packed, num_kv_heads, 2, padded head_dim], bfloat16; num_packed: keys, padded row by row
