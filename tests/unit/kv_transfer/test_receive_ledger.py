"""Every byte counts once; what does not fit is refused and leaves the ledger as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.page_transport import Segment
from kv_transfer.receive_ledger import ReceiveLedger
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import ReservationId
from serving_core.kv_page_layout import KVDType, KVPageLayout

LAYOUT = KVPageLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=4, dtype=KVDType.FLOAT32)  # 64 bytes
FIRST_PAGE = 5
NUM_PAGES = 3


def segment(ordinal: int, offset: int, num_bytes: int) -> Segment:
    return Segment(
        reservation_id=ReservationId("0" * 32),
        attempt=1,
        page_ordinal=ordinal,
        offset=offset,
        payload=memoryview(bytes(num_bytes)),
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


@pytest.mark.parametrize(("offset", "num_bytes"), [(15, 2), (16, 15), (16, 17), (17, 16), (31, 1), (0, 64), (20, 4)])
def test_an_overlap_with_another_extent_is_refused(ledger: ReceiveLedger, offset: int, num_bytes: int) -> None:
    ledger.add([segment(5, 16, 16)])
    assert_refused(ledger, [segment(5, offset, num_bytes)])


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


EXTENTS = st.tuples(st.integers(4, 8), st.integers(0, 64), st.integers(0, 65))


@given(st.lists(st.lists(EXTENTS, max_size=4), max_size=20))
def test_it_agrees_with_a_map_of_bytes(batches: list[list[tuple[int, int, int]]]) -> None:
    ledger = ReceiveLedger(LAYOUT, FIRST_PAGE, NUM_PAGES)
    extents: set[tuple[int, int, int]] = set()
    for batch in batches:
        after = set(extents)
        is_good = True
        for ordinal, offset, num_bytes in batch:
            is_inside = FIRST_PAGE <= ordinal < FIRST_PAGE + NUM_PAGES and num_bytes > 0 and offset + num_bytes <= 64
            overlaps = any(
                ordinal == other and offset < start + length and start < offset + num_bytes
                for other, start, length in after - {(ordinal, offset, num_bytes)}
            )
            is_good = is_good and is_inside and not overlaps
            after.add((ordinal, offset, num_bytes))
        try:
            new = ledger.add([segment(*extent) for extent in batch])
        except Refused:
            assert not is_good
        else:
            assert is_good
            assert {(s.page_ordinal, s.offset, s.payload.nbytes) for s in new} == after - extents
            extents = after
        assert ledger.num_bytes_received == sum(length for _, _, length in extents)
        assert ledger.is_complete == (ledger.num_bytes_received == 192)
