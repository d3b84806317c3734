"""Where a step's tokens lie in the cache, as tensors that paged attention kernels take. Plain index arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llm_engine.attention import AttentionRow
from llm_engine.device import to_device
from serving_core.kv_page_layout import KVPageLayout


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PagedPlaces:
    """Beyond a row's own pages ``page_table`` holds 0, which is never read. ``max_row_keys`` bounds the keys of a row."""

    pages: Tensor  # [num_tokens], int64: the page of each of the step's tokens
    slots: Tensor  # [num_tokens], int64: the token's slot in that page
    page_table: Tensor  # [num_rows, width], int32
    num_keys: Tensor  # [num_rows], int32: of each row's whole sequence
    first_tokens: Tensor  # [num_rows + 1], int32: where each row begins among the step's tokens, then their number
    first_keys: Tensor  # [num_rows + 1], int32: the sum of num_keys before each row, then of all
    max_row_tokens: int
    max_row_keys: int

    @classmethod
    def of(cls, rows: Sequence[AttentionRow], layout: KVPageLayout, *, num_table_pages: int | None = None) -> PagedPlaces:
        """In host memory. ``num_table_pages`` is the width of the table; None for the longest row's."""
        widest = max(len(row.page_ids) for row in rows)
        width = widest if num_table_pages is None else num_table_pages
        assert widest <= width, "a row's pages fit into the table"
        table = np.zeros((len(rows), width), np.int32)
        for index, row in enumerate(rows):
            table[index, : len(row.page_ids)] = row.page_ids
        num_keys = np.array([row.num_keys for row in rows], np.int32)
        num_tokens = np.array([row.num_tokens for row in rows], np.int32)
        max_row_keys = int(num_keys.max()) if num_table_pages is None else width * layout.page_size
        return cls(
            pages=torch.from_numpy(np.concatenate([_pages(row, layout.page_size) for row in rows])),
            slots=torch.from_numpy(np.concatenate([_positions(row) % layout.page_size for row in rows])),
            page_table=torch.from_numpy(table),
            num_keys=torch.from_numpy(num_keys),
            first_tokens=_sums(num_tokens),
            first_keys=_sums(num_keys),
            max_row_tokens=int(num_tokens.max()),
            max_row_keys=max_row_keys,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @property
    def has_one_token_rows(self) -> bool:
        """Whether every row is a single token, as in decode."""
        return self.max_row_tokens == 1

    def to(self, device: torch.device) -> PagedPlaces:
        """The same, which is in host memory, on ``device``."""
        return PagedPlaces(
            pages=to_device(self.pages, device),
            slots=to_device(self.slots, device),
            page_table=to_device(self.page_table, device),
            num_keys=to_device(self.num_keys, device),
            first_tokens=to_device(self.first_tokens, device),
            first_keys=to_device(self.first_keys, device),
            max_row_tokens=self.max_row_tokens,
            max_row_keys=self.max_row_keys,
        )

    def copy_(self, other: PagedPlaces) -> None:
        """Take over the numbers of ``other``, which has the same shapes, in place: a captured graph reads them here."""
        assert (self.max_row_tokens, self.max_row_keys) == (other.max_row_tokens, other.max_row_keys)
        self.pages.copy_(other.pages)
        self.slots.copy_(other.slots)
        self.page_table.copy_(other.page_table)
        self.num_keys.copy_(other.num_keys)
        self.first_tokens.copy_(other.first_tokens)
        self.first_keys.copy_(other.first_keys)


def _positions(row: AttentionRow) -> npt.NDArray[np.int64]:
    return np.arange(row.start_position, row.num_keys, dtype=np.int64)


def _pages(row: AttentionRow, page_size: int) -> npt.NDArray[np.int64]:
    return np.asarray(row.page_ids, np.int64)[_positions(row) // page_size]


def _sums(counts: npt.NDArray[np.int32]) -> Tensor:
    """0, then the running sums."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
