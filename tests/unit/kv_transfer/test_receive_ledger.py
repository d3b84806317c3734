"""Every byte counts once; what does not fit is refused and leaves the ledger as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.page_transport import Segment
from kv_transfer.receive_ledger import ReceiveLedger
from serving_core.byte_stride import ByteStride
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import ReservationId
from serving_core.kv_page_layout import KVDType, KVPageLayout

LAYOUT = KVPageLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=4, dtype=KVDType.FLOAT32)  # 64 bytes
FIRST_PAGE = 5
NUM_PAGES = 3


def segment(ordinal: int, offset: int, num_bytes: int, stride: ByteStride | None = None) -> Segment:
    return Segment(
        reservation_id=ReservationId("0" * 32),
        attempt=1,
        page_ordinal=ordinal,
        offset=offset,
        payload=memoryview(bytes(num_bytes)),
        stride=stride,
    )


@pytest.fixture
def ledger() -> ReceiveLedger:
    return ReceiveLedger(LAYOUT, FIRST_PAGE, NUM_PAGES)


def test_it_is_complete_with_the_last_byte(ledger: ReceiveLedger) -> None:
    for ordinal in (7, 5, 6):
        assert not ledger.is_complete
        ledger.add([segment(ordinal, 0, 63), segment(ordinal, 63, 1)])
    assert ledger.is_complete
    assert ledger.num_bytes_received == ledger.num_bytes_expected == 3 * 64


def test_it_returns_what_is_new_in_order(ledger: ReceiveLedger) -> None:
    first, second = segment(5, 32, 32), segment(5, 0, 32)
    assert ledger.add([first]) == (first,)
    assert ledger.add([second, first, second]) == (second,)
    assert ledger.num_bytes_received == 64


@pytest.mark.parametrize(
    ("ordinal", "offset", "num_bytes"),
    [(4, 0, 1), (8, 0, 1), (2**32 - 1, 0, 1), (5, 64, 1), (5, 60, 5), (5, 2**32 - 1, 1), (5, 0, 65), (5, 0, 0), (5, 64, 0)],
)
def test_what_is_out_of_range_is_refused(ledger: ReceiveLedger, ordinal: int, offset: int, num_bytes: int) -> None:
    assert_refused(ledger, [segment(ordinal, offset, num_bytes)])


@pytest.mark.parametrize(("offset", "num_bytes"), [(15, 2), (16, 17), (17, 16), (31, 2), (0, 64), (0, 63)])
def test_a_segment_of_which_a_part_has_arrived_is_refused(ledger: ReceiveLedger, offset: int, num_bytes: int) -> None:
    ledger.add([segment(5, 16, 16)])
    assert_refused(ledger, [segment(5, offset, num_bytes)])


@pytest.mark.parametrize(("offset", "num_bytes"), [(16, 15), (31, 1), (20, 4)])
def test_bytes_that_have_all_arrived_are_known_however_they_are_cut(ledger: ReceiveLedger, offset: int, num_bytes: int) -> None:
    ledger.add([segment(5, 16, 16)])
    assert ledger.add([segment(5, offset, num_bytes)]) == ()
    assert ledger.num_bytes_received == 16


def test_several_sources_fill_one_page_with_runs(ledger: ReceiveLedger) -> None:
    wide, narrow = ByteStride(run_bytes=5, step_bytes=8), ByteStride(run_bytes=3, step_bytes=8)
    first, second = segment(6, 0, 40, wide), segment(6, 5, 24, narrow)
    assert ledger.add([second, first]) == (second, first)
    assert ledger.num_bytes_received == 64
    assert ledger.add([first, second, segment(6, 0, 64)]) == ()
    assert_refused(ledger, [segment(6, 6, 24, narrow)])  # ends outside the page, although every byte of it is there
    ledger.add([segment(7, 5, 24, narrow)])
    assert_refused(ledger, [segment(7, 0, 24, narrow), segment(7, 3, 40, wide)])
    assert_refused(ledger, [segment(7, 0, 64)])
    assert ledger.add([segment(7, 0, 24, narrow)])


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 16), (32, 1), (32, 32), (15, 1)])
def test_a_neighbour_is_accepted(ledger: ReceiveLedger, offset: int, num_bytes: int) -> None:
    ledger.add([segment(5, 16, 16)])
    assert ledger.add([segment(5, offset, num_bytes)])


def test_a_batch_is_recorded_wholly_or_not_at_all(ledger: ReceiveLedger) -> None:
    held = segment(5, 0, 16)
    ledger.add([held])
    assert_refused(ledger, [segment(6, 0, 64), held, segment(5, 16, 16), segment(5, 17, 16)])
    assert ledger.add([segment(6, 0, 32), segment(5, 16, 48)])  # nothing of the batch is in the way
    assert ledger.add([held]) == ()


def test_a_reservation_without_pages_is_complete_at_once() -> None:
    empty = ReceiveLedger(LAYOUT, 0, 0)
    assert empty.is_complete
    assert_refused(empty, [segment(0, 0, 1)])


def assert_refused(ledger: ReceiveLedger, segments: list[Segment]) -> None:
    before = ledger.num_bytes_received
    with pytest.raises(Refused) as refused:
        ledger.add(segments)
    assert refused.value.code is RefusalCode.MALFORMED
    assert ledger.num_bytes_received == before


EXTENTS = st.tuples(
    st.integers(4, 8),
    st.integers(0, 64),
    st.integers(0, 65),
    st.none()
    | st.builds(lambda run, gap: ByteStride(run_bytes=run, step_bytes=run + gap), st.integers(1, 9), st.integers(1, 9)),
)


def bytes_of(extent: tuple[int, int, int, ByteStride | None]) -> set[tuple[int, int]]:
    """Every byte of a segment, as (page ordinal, offset)."""
    ordinal, offset, num_bytes, stride = extent
    runs = [range(offset, offset + num_bytes)]
    if stride is not None:
        num_runs = num_bytes // stride.run_bytes
        starts = [offset + number * stride.step_bytes for number in range(num_runs)]
        runs = [range(start, start + stride.run_bytes) for start in starts]
    return {(ordinal, byte) for run in runs for byte in run}


@given(st.lists(st.lists(EXTENTS, max_size=4), max_size=20))
def test_it_agrees_with_a_map_of_bytes(batches: list[list[tuple[int, int, int, ByteStride | None]]]) -> None:
    ledger = ReceiveLedger(LAYOUT, FIRST_PAGE, NUM_PAGES)
    there: set[tuple[int, int]] = set()
    expected = {(ordinal, byte) for ordinal in range(FIRST_PAGE, FIRST_PAGE + NUM_PAGES) for byte in range(64)}
    for batch in batches:
        after = set(there)
        is_good = True
        new = []
        batch = [(o, a, n // s.run_bytes * s.run_bytes if s else n, s) for o, a, n, s in batch]  # noqa: PLW2901
        for extent in batch:
            own = bytes_of(extent)
            is_good = is_good and bool(own) and own <= expected and (own <= after or not own & after)
            if not own <= after:
                new.append(extent)
            after |= own
        try:
            added = ledger.add([segment(*extent) for extent in batch])
        except Refused:
            assert not is_good
        else:
            assert is_good
            assert [(s.page_ordinal, s.offset, s.payload.nbytes, s.stride) for s in added] == new
            there = after
        assert ledger.num_bytes_received == len(there)
        assert ledger.is_complete == (there == expected)
