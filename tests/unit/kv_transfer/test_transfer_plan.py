"""A plan covers every destination byte exactly once, however it is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transfer_plan import ByteRun, TransferPlan
from serving_core.errors import RefusalCode, Refused
from serving_core.kv_page_layout import KVDType, KVPageLayout

LAYOUT = KVPageLayout(num_layers=2, num_kv_heads=3, head_dim=8, page_size=4, dtype=KVDType.BFLOAT16)


@given(st.integers(1, 2 * LAYOUT.page_bytes))
def test_equal_layouts_are_copied_byte_for_byte(max_segment_bytes: int) -> None:
    pieces = TransferPlan.between(LAYOUT, LAYOUT).cut(max_segment_bytes)
    covered = 0
    for piece in pieces:
        assert piece.destination_offset == piece.source_offset == covered
        assert 1 <= piece.num_bytes <= max_segment_bytes
        covered += piece.num_bytes
    assert covered == LAYOUT.page_bytes
    assert len(pieces) == -(-LAYOUT.page_bytes // max_segment_bytes)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(LAYOUT, num_layers=3), "num_layers is 2 at the sender and 3 at the receiver"),
        (replace(LAYOUT, num_kv_heads=1), "num_kv_heads is 3 at the sender and 1 at the receiver"),
        (replace(LAYOUT, head_dim=16), "head_dim is 8 at the sender and 16 at the receiver"),
        (replace(LAYOUT, page_size=8), "page_size is 4 at the sender and 8 at the receiver"),
        (replace(LAYOUT, dtype=KVDType.FLOAT32), "dtype is bfloat16 at the sender and float32 at the receiver"),
        (replace(LAYOUT, dtype=KVDType.INT8), "dtype is bfloat16 at the sender and int8 at the receiver"),
    ],
)
def test_layouts_that_differ_are_refused_in_one_sentence(other: KVPageLayout, words: str) -> None:
    with pytest.raises(Refused) as refused:
        TransferPlan.between(LAYOUT, other)
    assert refused.value.code is RefusalCode.LAYOUT_MISMATCH
    assert words in str(refused.value)
    assert str(refused.value).count(".") == 1


SIZE = LAYOUT.page_bytes
HALF = SIZE // 2


@pytest.mark.parametrize(
    "runs",
    [
        (),
        ((0, 0, SIZE - 1),),
        ((0, 1, SIZE - 1),),
        ((0, 0, HALF), (0, HALF - 1, HALF + 1)),
        ((0, 0, HALF), (0, HALF + 1, HALF - 1)),
        ((1, 0, SIZE),),
        ((-1, 0, SIZE),),
        ((0, 0, SIZE), (0, SIZE, 0)),
    ],
)
def test_a_plan_that_leaves_or_doubles_bytes_cannot_be_made(runs: tuple[tuple[int, int, int], ...]) -> None:
    byte_runs = tuple(ByteRun(source_offset=a, destination_offset=b, num_bytes=n) for a, b, n in runs)
    with pytest.raises(AssertionError):
        TransferPlan(source=LAYOUT, destination=LAYOUT, runs=byte_runs)


def test_strided_runs_are_cut_at_their_ends() -> None:
    runs = (
        ByteRun(source_offset=HALF, destination_offset=0, num_bytes=HALF),
        ByteRun(source_offset=0, destination_offset=HALF, num_bytes=HALF),
    )
    pieces = TransferPlan(source=LAYOUT, destination=LAYOUT, runs=runs).cut(HALF - 1)
    assert [(piece.source_offset, piece.destination_offset, piece.num_bytes) for piece in pieces] == [
        (HALF, 0, HALF - 1),
        (SIZE - 1, HALF - 1, 1),
        (0, HALF, HALF - 1),
        (HALF - 1, SIZE - 1, 1),
    ]
