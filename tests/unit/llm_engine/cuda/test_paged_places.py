"""Page tables, slots and sums as kernels take them, against the same said with loops."""

from __future__ import annotations

import pytest
import torch

from llm_engine.attention import AttentionRow
from llm_engine.cuda.paged_places import PagedPlaces
from serving_core.ids import PageId
from serving_core.kv_page_layout import KVDType, KVPageLayout

LAYOUT = KVPageLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=KVDType.FLOAT32)


def row(start: int, end: int, *page_ids: int) -> AttentionRow:
    return AttentionRow(num_tokens=end - start, start_position=start, page_ids=tuple(map(PageId, page_ids)))


ROWS = [row(0, 6, 7, 2), row(8, 9, 1, 5, 4), row(3, 4, 9), row(4, 12, 3, 0, 8)]


def test_every_token_has_its_page_and_slot() -> None:
    places = PagedPlaces.of(ROWS, LAYOUT)
    expected = [
        (each.page_ids[position // 4], position % 4) for each in ROWS for position in range(each.start_position, each.num_keys)
    ]
    assert list(zip(places.pages.tolist(), places.slots.tolist(), strict=True)) == expected
    assert places.num_tokens == 6 + 1 + 1 + 8
    assert places.pages.dtype is places.slots.dtype is torch.int64


def test_the_table_has_each_rows_pages_in_order() -> None:
    places = PagedPlaces.of(ROWS, LAYOUT)
    assert places.page_table.tolist() == [[7, 2, 0], [1, 5, 4], [9, 0, 0], [3, 0, 8]]
    assert places.num_keys.tolist() == [6, 9, 4, 12]
    assert places.first_tokens.tolist() == [0, 6, 7, 8, 16]
    assert places.first_keys.tolist() == [0, 6, 15, 19, 31]
    assert (places.max_row_tokens, places.max_row_keys) == (8, 12)
    assert not places.has_one_token_rows
    for tensor in (places.page_table, places.num_keys, places.first_tokens, places.first_keys):
        assert tensor.dtype is torch.int32
        assert tensor.is_contiguous()


def test_a_table_of_fixed_width_bounds_keys_by_its_width() -> None:
    places = PagedPlaces.of([row(8, 9, 1, 5, 4), row(3, 4, 9)], LAYOUT, num_table_pages=5)
    assert places.page_table.tolist() == [[1, 5, 4, 0, 0], [9, 0, 0, 0, 0]]
    assert places.max_row_keys == 20
    assert places.has_one_token_rows


def test_a_row_wider_than_the_table_is_a_fault() -> None:
    with pytest.raises(AssertionError):
        PagedPlaces.of(ROWS, LAYOUT, num_table_pages=2)


def test_numbers_are_taken_over_where_they_lie() -> None:
    static = PagedPlaces.of([row(0, 1, 3), row(0, 1, 3)], LAYOUT, num_table_pages=3)
    tensors = [static.pages, static.slots, static.page_table, static.num_keys, static.first_tokens, static.first_keys]
    other = PagedPlaces.of([row(8, 9, 1, 5, 4), row(3, 4, 9)], LAYOUT, num_table_pages=3)
    static.copy_(other)
    expected = [other.pages, other.slots, other.page_table, other.num_keys, other.first_tokens, other.first_keys]
    assert [tensor.tolist() for tensor in tensors] == [tensor.tolist() for tensor in expected]
