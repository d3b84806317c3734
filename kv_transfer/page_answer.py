"""The wire form of what a receiver says on the page path: how far it has got, or why it stops.

    accepted:  0 (u8), number of the stream's segments accepted so far, in order (u64)
    refused:   1 (u8), refusal code (u32), one sentence in UTF-8 to the end of the message; nothing follows on this stream

Integers are little-endian.
"""

from __future__ import annotations

import struct

from serving_core.errors import RefusalCode, Refused

MAX_ANSWER_BYTES = 4096
_ACCEPTED = struct.Struct("<BQ")
_REFUSED = struct.Struct("<BI")


def encode_accepted(num_accepted: int) -> bytes:
    """Says that the first ``num_accepted`` segments of the stream are in their pages."""
    return _ACCEPTED.pack(0, num_accepted)


def encode_refused(refusal: Refused) -> bytes:
    """Says that the next segment was declined. A sentence too long for one answer is cut."""
    sentence = str(refusal).encode()[: MAX_ANSWER_BYTES - _REFUSED.size]
    return _REFUSED.pack(1, refusal.code.value) + sentence


def decode_answer(answer: bytes) -> int:
    """The number of segments accepted so far.

    Takes any bytes. Raises the receiver's ``Refused``, or ``Refused`` (MALFORMED) for bytes that are no answer.
    """
    if len(answer) == _ACCEPTED.size and answer[0] == 0:
        num_accepted: int = _ACCEPTED.unpack(answer)[1]
        return num_accepted
    if _REFUSED.size <= len(answer) <= MAX_ANSWER_BYTES and answer[0] == 1:
        code = _REFUSED.unpack_from(answer)[1]
        if any(code == known.value for known in RefusalCode):
            raise Refused(RefusalCode(code), answer[_REFUSED.size :].decode(errors="replace"))
    raise Refused(RefusalCode.MALFORMED, f"The receiver's answer of {len(answer)} bytes has no known form.")
