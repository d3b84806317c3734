"""Where a segment's bytes lie in its page, in one piece or in runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.page_transport import Segment
from serving_core.byte_stride import ByteStride
from serving_core.ids import ReservationId

ONE = Segment(reservation_id=ReservationId("0" * 32), attempt=1, page_ordinal=0, offset=2, payload=memoryview(b"abcdef"))
STRIDED = replace(ONE, stride=ByteStride(run_bytes=2, step_bytes=5))


@pytest.mark.parametrize(
    ("segment", "expected"),
    [
        (ONE, b"..abcdef......"),
        (STRIDED, b"..ab...cd...ef"),
        (replace(STRIDED, offset=0, payload=memoryview(b"ab")), b"ab............"),
        (replace(ONE, payload=memoryview(b"abcdefghijkl")), b"..abcdefghijkl"),
    ],
)
def test_bytes_come_to_their_place_and_nothing_else_is_touched(segment: Segment, expected: bytes) -> None:
    page = bytearray(b"." * 14)
    place = segment.place_in(np.frombuffer(page, dtype=np.uint8))
    place[...] = np.frombuffer(segment.payload, dtype=np.uint8).reshape(place.shape)
    assert bytes(page) == expected
    assert segment.end == len(expected.rstrip(b"."))


@pytest.mark.parametrize("segment", [ONE, STRIDED])
def test_a_place_is_a_view_of_any_kind_of_element(segment: Segment) -> None:
    numbers = np.arange(14, dtype=np.int32)
    place = segment.place_in(numbers)
    assert place.size == 6
    place[...] = -1
    assert (numbers == -1).sum() == 6


@pytest.mark.parametrize("segment", [replace(ONE, offset=9), replace(STRIDED, offset=3), replace(ONE, offset=-1)])
def test_a_segment_that_does_not_end_within_its_page_has_no_place_in_it(segment: Segment) -> None:
    with pytest.raises(AssertionError):
        segment.place_in(np.zeros(14, dtype=np.uint8))


@pytest.mark.parametrize(("run_bytes", "step_bytes"), [(0, 1), (2, 2), (3, 2)])
def test_runs_that_touch_are_no_stride(run_bytes: int, step_bytes: int) -> None:
    with pytest.raises(AssertionError):
        ByteStride(run_bytes=run_bytes, step_bytes=step_bytes)
