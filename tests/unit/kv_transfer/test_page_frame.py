"""A segment survives its frame; anything else is refused, whatever the bytes are."""

from __future__ import annotations

import struct
from dataclasses import replace

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.page_frame import HEADER_BYTES, MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES, VERSION, decode_frame, encode_frame
from kv_transfer.page_transport import Segment
from serving_core.byte_stride import ByteStride
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import ReservationId

U32 = st.integers(0, 2**32 - 1)
SEGMENTS = st.builds(
    Segment,
    reservation_id=st.binary(min_size=16, max_size=16).map(lambda raw: ReservationId(raw.hex())),
    attempt=U32,
    page_ordinal=U32,
    offset=U32,
    payload=st.binary(min_size=1, max_size=300).map(memoryview),
)
STRIDED = st.builds(
    lambda segment, num_runs, gap: replace(
        segment,
        payload=memoryview(bytes(segment.payload) * num_runs),
        stride=ByteStride(run_bytes=segment.payload.nbytes, step_bytes=segment.payload.nbytes + gap),
    ),
    SEGMENTS,
    st.integers(1, 4),
    st.integers(1, 1000),
)
ONE = Segment(
    reservation_id=ReservationId("00112233445566778899aabbccddeeff"),
    attempt=1,
    page_ordinal=2,
    offset=3,
    payload=memoryview(b"page bytes"),
)


def refusal_of(frame: bytes) -> RefusalCode:
    with pytest.raises(Refused) as refused:
        decode_frame(frame)
    return refused.value.code


@given(SEGMENTS | STRIDED)
def test_a_segment_survives_its_frame(segment: Segment) -> None:
    assert decode_frame(encode_frame(segment)) == segment


def test_the_bytes_of_a_frame_are_fixed() -> None:
    fields = bytes.fromhex(
        "54574b56 02000000 00112233445566778899aabbccddeeff 01000000 02000000 03000000 0a000000 00000000 00000000",
    )
    checksum = google_crc32c.value(fields + b"page bytes")
    assert encode_frame(ONE) == fields + struct.pack("<I", checksum) + b"page bytes"
    assert HEADER_BYTES == 52


def test_the_bytes_of_a_strided_frame_are_fixed() -> None:
    frame = encode_frame(replace(ONE, stride=ByteStride(run_bytes=5, step_bytes=7)))
    assert frame[36:48] == bytes.fromhex("0a000000 05000000 07000000")


@pytest.mark.parametrize(
    ("run_bytes", "step_bytes"), [(3, 7), (11, 12), (5, 5), (5, 4), (0, 7), (5, 0), (2**32 - 1, 2**32 - 1)]
)
def test_runs_that_cannot_be_are_refused(run_bytes: int, step_bytes: int) -> None:
    fields = encode_frame(ONE)[:40] + struct.pack("<II", run_bytes, step_bytes)
    checksum = google_crc32c.value(fields + b"page bytes")
    assert refusal_of(fields + struct.pack("<I", checksum) + b"page bytes") is RefusalCode.MALFORMED


def test_the_checksum_is_crc32c() -> None:
    assert google_crc32c.value(b"123456789") == 0xE3069283  # the check value of RFC 3720's polynomial


def test_the_payload_is_a_view_of_the_frame() -> None:
    frame = encode_frame(ONE)
    payload = decode_frame(frame).payload
    assert payload.obj is frame
    assert payload.readonly


@pytest.mark.parametrize("memory", [bytearray(b"writable"), memoryview(b"a slice of more")[2:9]])
def test_any_contiguous_memory_can_be_sent(memory: bytearray | memoryview) -> None:
    segment = Segment(reservation_id=ONE.reservation_id, attempt=1, page_ordinal=0, offset=0, payload=memoryview(memory))
    assert decode_frame(encode_frame(segment)).payload == bytes(memory)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(frame: bytes) -> None:
    assert refusal_of(frame) is RefusalCode.MALFORMED


@given(st.binary(max_size=100), U32)
def test_arbitrary_bytes_behind_a_valid_start_are_refused(rest: bytes, claimed: int) -> None:
    start = struct.pack("<4sI16sIIIIII", b"TWKV", VERSION, bytes(16), 1, 0, 0, claimed, 0, 0)
    assert refusal_of(start + rest) in (RefusalCode.MALFORMED, RefusalCode.CHECKSUM_MISMATCH)


@given(SEGMENTS, st.data())
def test_a_truncated_frame_is_refused(segment: Segment, data: st.DataObject) -> None:
    frame = encode_frame(segment)
    length = data.draw(st.integers(0, len(frame) - 1))
    assert refusal_of(frame[:length]) is RefusalCode.MALFORMED


@given(SEGMENTS, st.binary(min_size=1, max_size=40))
def test_a_lengthened_frame_is_refused(segment: Segment, tail: bytes) -> None:
    assert refusal_of(encode_frame(segment) + tail) is RefusalCode.MALFORMED


@given(SEGMENTS, st.data())
def test_a_flipped_bit_is_refused(segment: Segment, data: st.DataObject) -> None:
    frame = bytearray(encode_frame(segment))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    is_told_by_format = at < 8 or 36 <= at < 40  # magic, version, length
    expected = RefusalCode.MALFORMED if is_told_by_format else RefusalCode.CHECKSUM_MISMATCH
    assert refusal_of(bytes(frame)) is expected


def test_a_frame_without_payload_is_refused() -> None:
    assert refusal_of(encode_frame(ONE)[:HEADER_BYTES]) is RefusalCode.MALFORMED


def test_the_largest_payload_fits_and_one_byte_more_is_refused() -> None:
    segment = Segment(
        reservation_id=ONE.reservation_id, attempt=1, page_ordinal=0, offset=0, payload=memoryview(bytes(MAX_PAYLOAD_BYTES))
    )
    frame = encode_frame(segment)
    assert len(frame) == MAX_FRAME_BYTES
    assert decode_frame(frame) == segment
    assert refusal_of(frame + b"\0") is RefusalCode.MALFORMED


@pytest.mark.parametrize(
    "reservation_id", ["", "00", "zz" * 16, "AB" * 16, " " * 32, "00 11223344556677889900112233445", "ü" * 32, "0" * 33]
)
def test_a_reservation_id_that_is_no_id_is_refused(reservation_id: str) -> None:
    segment = Segment(
        reservation_id=ReservationId(reservation_id), attempt=1, page_ordinal=0, offset=0, payload=memoryview(b"x")
    )
    with pytest.raises(Refused) as refused:
        encode_frame(segment)
    assert refused.value.code is RefusalCode.MALFORMED
