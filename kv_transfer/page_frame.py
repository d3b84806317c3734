"""The wire form of a segment: a fixed header in front of raw page bytes. It knows the format, not who may write where.

    offset  0  magic "TWKV"
            4  version, u32
            8  reservation id, 16 raw bytes
           24  attempt, u32
           28  page ordinal, u32
           32  offset within the page in bytes, u32
           36  payload length in bytes, u32
           40  bytes in a run, u32; 0 when the payload lies in the page in one piece
           44  bytes from one run's start to the next one's, u32; 0 likewise
           48  CRC32C (RFC 3720, appendix B.4) of bytes 0 to 47 and the payload, u32
           52  payload

Integers are little-endian. A frame states its length only to be checked against the bytes that are there: nothing is ever
allocated by a number from the wire.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import google_crc32c
import numpy as np

from kv_transfer.page_transport import Segment
from serving_core.byte_stride import ByteStride
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import ReservationId

VERSION = 2
MAX_PAYLOAD_BYTES = 1 << 20
_MAGIC = b"TWKV"
_FIELDS = struct.Struct("<4sI16sIIIIII")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
MAX_FRAME_BYTES = HEADER_BYTES + MAX_PAYLOAD_BYTES


def encode_header(segment: Segment) -> bytes:
    """The header of ``segment``, for a transport that sends the payload another way.

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
        segment.stride.run_bytes if segment.stride else 0,
        segment.stride.step_bytes if segment.stride else 0,
    )
    return fields + _CHECKSUM.pack(_checksum(fields, segment.payload))


def encode_frame(segment: Segment) -> bytes:
    """The frame of ``segment``; copies the payload once. Raises like ``encode_header``."""
    return b"".join((encode_header(segment), segment.payload))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """What a frame claims about itself. Nothing in it is checked but its form, until ``check`` has seen the payload."""

    fields: bytes
    reservation_id: ReservationId
    attempt: int
    page_ordinal: int
    offset: int
    num_bytes: int
    run_bytes: int
    step_bytes: int
    checksum: int

    @classmethod
    def decode(cls, header: bytes) -> FrameHeader:
        """Takes any ``HEADER_BYTES`` bytes. Raises ``Refused`` (MALFORMED) when they break the format, which includes a payload
        length outside 1 to ``MAX_PAYLOAD_BYTES``."""
        if len(header) != HEADER_BYTES:
            raise _malformed(f"A frame's header has {len(header)} bytes, not {HEADER_BYTES}.")
        magic, version, raw_id, attempt, page_ordinal, offset, num_bytes, run_bytes, step_bytes = _FIELDS.unpack_from(header)
        if magic != _MAGIC:
            raise _malformed(f"A frame starts with {magic!r}, not {_MAGIC!r}.")
        if version != VERSION:
            raise _malformed(f"A frame has version {version}; this worker reads version {VERSION}.")
        if not 1 <= num_bytes <= MAX_PAYLOAD_BYTES:
            raise _malformed(f"A frame claims {num_bytes} bytes of payload, outside 1 to {MAX_PAYLOAD_BYTES}.")
        return cls(
            fields=header[: _FIELDS.size],
            reservation_id=ReservationId(raw_id.hex()),
            attempt=attempt,
            page_ordinal=page_ordinal,
            offset=offset,
            num_bytes=num_bytes,
            run_bytes=run_bytes,
            step_bytes=step_bytes,
            checksum=_CHECKSUM.unpack_from(header, _FIELDS.size)[0],
        )

    def check(self, payload: memoryview) -> Segment:
        """The segment, around ``payload`` and not a copy of it; so nobody else may be able to write there any more.

        Raises ``Refused``: MALFORMED for another length than claimed or runs that it cannot lie in, CHECKSUM_MISMATCH for other
        bytes.
        """
        if self.num_bytes != payload.nbytes:
            raise _malformed(f"A frame claims {self.num_bytes} bytes of payload and holds {payload.nbytes}.")
        actual = _checksum(self.fields, payload)
        if actual != self.checksum:
            raise Refused(
                RefusalCode.CHECKSUM_MISMATCH,
                f"Page {self.page_ordinal} at offset {self.offset} arrived with checksum {actual:08x} instead of "
                f"{self.checksum:08x}.",
            )
        return Segment(
            reservation_id=self.reservation_id,
            attempt=self.attempt,
            page_ordinal=self.page_ordinal,
            offset=self.offset,
            payload=payload,
            stride=self._stride(),
        )

    def _stride(self) -> ByteStride | None:
        run_bytes, step_bytes = self.run_bytes, self.step_bytes
        if run_bytes == step_bytes == 0:
            return None
        if not 1 <= run_bytes < step_bytes or self.num_bytes % run_bytes:
            raise _malformed(f"A frame of {self.num_bytes} bytes cannot lie in runs of {run_bytes}, {step_bytes} apart.")
        return ByteStride(run_bytes=run_bytes, step_bytes=step_bytes)


def decode_frame(frame: bytes) -> Segment:
    """The segment in ``frame``; its payload is a view of ``frame``, not a copy.

    Takes any bytes. Raises ``Refused``: MALFORMED when they break the format, CHECKSUM_MISMATCH when they were changed on
    their way.
    """
    if not HEADER_BYTES < len(frame) <= MAX_FRAME_BYTES:
        raise _malformed(f"A frame of {len(frame)} bytes is outside {HEADER_BYTES + 1} to {MAX_FRAME_BYTES}.")
    return FrameHeader.decode(frame[:HEADER_BYTES]).check(memoryview(frame)[HEADER_BYTES:])


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
