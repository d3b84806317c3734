"""How the two ends of a pair learn of each other, over gRPC, and how the sender announces what it sends: the messages of a
pair's call. It knows their form, not who may say what.

    hello         sender:    magic "TWKG", version (u32), number of slots (u32), 1 for a CUDA device or 0 for host memory (u8),
                             SHA-256 of the incarnation that the ticket names
    welcome       receiver:  magic "TWKG", version (u32), the store's port (u16), name of the meeting, proof of the sender,
                             proof of the receiver (16 bytes each), all of them drawn for this pair
    announcement  sender:    headers of one or several frames (``page_frame``), whose payloads follow over the group in their
                             order

Integers are little-endian. The receiver answers as on every page path (``page_answer``): first with 0 accepted segments, once
both ends have shown their proofs over the group; a refusal may come in the place of any answer.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.page_answer import decode_answer
from kv_transfer.page_frame import HEADER_BYTES, FrameHeader
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import Incarnation

VERSION = 1
_MAGIC = b"TWKG"
_HELLO = struct.Struct("<4sIIB32s")
_WELCOME = struct.Struct("<4sIH16s16s16s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairHello:
    """What a sender asks for. ``incarnation_print`` says whom it means."""

    num_slots: int
    is_cuda: bool
    incarnation_print: bytes

    def encode(self) -> bytes:
        return _HELLO.pack(_MAGIC, VERSION, self.num_slots, self.is_cuda, self.incarnation_print)

    @classmethod
    def decode(cls, message: bytes) -> PairHello:
        """Takes any bytes. Raises ``Refused`` (MALFORMED)."""
        if len(message) != _HELLO.size:
            raise _malformed(f"A pair's hello has {len(message)} bytes, not {_HELLO.size}.")
        magic, version, num_slots, is_cuda, incarnation_print = _HELLO.unpack(message)
        _check_start("hello", magic, version)
        if is_cuda not in (0, 1):
            raise _malformed(f"A pair's hello names device kind {is_cuda}, which is neither 0 nor 1.")
        return cls(num_slots=num_slots, is_cuda=bool(is_cuda), incarnation_print=incarnation_print)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairWelcome:
    """Where and how the two ends meet."""

    port: int
    name: bytes
    sender_proof: bytes
    receiver_proof: bytes

    @classmethod
    def draw(cls, port: int) -> PairWelcome:
        """With a name and proofs that nobody can guess."""
        name, sender_proof, receiver_proof = (secrets.token_bytes(16) for _ in range(3))
        return cls(port=port, name=name, sender_proof=sender_proof, receiver_proof=receiver_proof)

    def encode(self) -> bytes:
        return _WELCOME.pack(_MAGIC, VERSION, self.port, self.name, self.sender_proof, self.receiver_proof)

    @classmethod
    def decode(cls, message: bytes) -> PairWelcome:
        """Takes any bytes. Raises the receiver's ``Refused``, or ``Refused`` (MALFORMED) for bytes that are no welcome."""
        if len(message) != _WELCOME.size or not message.startswith(_MAGIC):
            decode_answer(message)
            raise _malformed("The receiver answered a pair's hello before it had met the sender.")
        magic, version, port, name, sender_proof, receiver_proof = _WELCOME.unpack(message)
        _check_start("welcome", magic, version)
        return cls(port=port, name=name, sender_proof=sender_proof, receiver_proof=receiver_proof)


def print_of(incarnation: Incarnation) -> bytes:
    """32 bytes, whatever its length."""
    return hashlib.sha256(incarnation.encode()).digest()


def encode_announcement(headers: Sequence[bytes]) -> bytes:
    """Of at least one header."""
    assert headers
    return b"".join(headers)


def decode_announcement(message: bytes, *, max_headers: int) -> list[FrameHeader]:
    """One header to ``max_headers``. Takes any bytes. Raises ``Refused`` (MALFORMED)."""
    if not message or len(message) % HEADER_BYTES:
        raise _malformed(f"An announcement of {len(message)} bytes holds no whole number of headers of {HEADER_BYTES}.")
    if len(message) > max_headers * HEADER_BYTES:
        num_headers = len(message) // HEADER_BYTES
        raise _malformed(f"An announcement has {num_headers} headers, but may have {max_headers} before an answer.")
    return [FrameHeader.decode(message[at : at + HEADER_BYTES]) for at in range(0, len(message), HEADER_BYTES)]


def _check_start(kind: str, magic: bytes, version: int) -> None:
    if (magic, version) != (_MAGIC, VERSION):
        raise _malformed(f"A pair's {kind} starts with {magic!r} and version {version}, not {_MAGIC!r} and {VERSION}.")


def _malformed(message: str) -> Refused:
    return Refused(RefusalCode.MALFORMED, message)
