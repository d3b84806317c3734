"""The wire form of a segment: a fixed header in front of raw page bytes. It knows the format, not who may write where.

    offset  0  magic "TWKV"
            4  version, u32
            8  reservation id, 16 raw bytes
           24  attempt, u32
           28  page ordinal, u32
           32  offset within the page in bytes, u32
           36  payload length in bytes, u32
           40  CRC32C (RFC 3720, appendix B.4) of bytes 0 to 39 and the payload, u32
           44  payload

Integers are little-endian. A frame states its length only to be checked against the bytes that are there: nothing is ever
allocated by a number from the wire.
"""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np

from kv_transfer.page_transport import Segment
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import ReservationId

VERSION = 1
MAX_PAYLOAD_BYTES = 1 << 20
_MAGIC = b"TWKV"
_FIELDS = struct.Struct("<4sI16sIIII")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
MAX_FRAME_BYTES = HEADER_BYTES + MAX_PAYLOAD_BYTES


def encode_frame(segment: Segment) -> bytes:
    """The frame of ``segment``; copies the payload once.

    Raises ``Refused`` (MALFORMED) when the reservation id, which came from a peer, is not 32 lower-case hexadecimal digits.
    """
    num_bytes = segment.payload.nbytes
    assert 1 <= num_bytes <= MAX_PAYLOAD_BYTES
    fields = _FIELDS.pack(
        _MAGIC,
        VERSION,
        _raw_reservation_id(segment.reservation_id),
        segment.attempt,
        segment.page_ordinal,
        segment.offset,
        num_bytes,
    )
    return b"".join((fields, _CHECKSUM.pack(_checksum(fields, segment.payload)), segment.payload))


def decode_frame(frame: bytes) -> Segment:
    """The segment in ``frame``; its payload is a view of ``frame``, not a copy.

    Takes any bytes. Raises ``Refused``: MALFORMED when they break the format, CHECKSUM_MISMATCH when they were changed on
    their way.
    """
    if not HEADER_BYTES < len(frame) <= MAX_FRAME_BYTES:
        raise _malformed(f"A frame of {len(frame)} bytes is outside {HEADER_BYTES + 1} to {MAX_FRAME_BYTES}.")
    magic, version, raw_id, attempt, page_ordinal, offset, num_bytes = _FIELDS.unpack_from(frame)
    if magic != _MAGIC:
        raise _malformed(f"A frame starts with {magic!r}, not {_MAGIC!r}.")
    if version != VERSION:
        raise _malformed(f"A frame has version {version}; this worker reads version {VERSION}.")
    payload = memoryview(frame)[HEADER_BYTES:]
    if num_bytes != payload.nbytes:
        raise _malformed(f"A frame claims {num_bytes} bytes of payload and holds {payload.nbytes}.")
    (expected,) = _CHECKSUM.unpack_from(frame, _FIELDS.size)
    actual = _checksum(frame[: _FIELDS.size], payload)
    if actual != expected:
        raise Refused(
            RefusalCode.CHECKSUM_MISMATCH,
            f"Page {page_ordinal} at offset {offset} arrived with checksum {actual:08x} instead of {expected:08x}.",
        )
    return Segment(
        reservation_id=ReservationId(raw_id.hex()),
        attempt=attempt,
        page_ordinal=page_ordinal,
        offset=offset,
        payload=payload,
    )


def _checksum(fields: bytes, payload: memoryview) -> int:
    # The checksum's C code takes no memoryview; an array over the same memory saves the copy.
    checksum: int = google_crc32c.extend(google_crc32c.value(fields), np.frombuffer(payload, dtype=np.uint8))
    return checksum


def _raw_reservation_id(reservation_id: ReservationId) -> bytes:
    try:
        raw = bytes.fromhex(reservation_id)
    except ValueError:
        raw = b""
    if len(raw) != 16 or raw.hex() != reservation_id:
        raise _malformed(f"Reservation id {reservation_id!r} is not 32 lower-case hexadecimal digits.")
    return raw


def _malformed(message: str) -> Refused:
    return Refused(RefusalCode.MALFORMED, message)
