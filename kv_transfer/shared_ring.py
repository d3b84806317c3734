"""Page bytes in memory that a sender and a receiver on one host both see: a ring of slots in a sealed memory file.

The file has no name (``memfd_create(2)``): it is private to whoever was handed its descriptor, and the kernel frees it with
its last user, however that one ends. The sender writes; the receiver has it mapped for reading and believes nothing in it:
only what it has copied out can no longer be changed. The seals are checked, because a sender that could shorten the file
would kill a receiver that reads it (SIGBUS).
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from kv_transfer.page_frame import MAX_PAYLOAD_BYTES
from serving_core.errors import RefusalCode, Refused

SLOT_BYTES = MAX_PAYLOAD_BYTES
"""Of a slot's memory only what was once written is ever there."""
MAX_SLOTS = 64
FILE_NAME = "twinpool-pages"
"""For people who look into /proc; it is no path."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedRing:
    """``num_slots`` slots of ``SLOT_BYTES``, mapped until ``close``."""

    def __init__(self, file: int, num_slots: int, *, is_writable: bool) -> None:
        self.num_slots = num_slots
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self._mapping = mmap.mmap(file, num_slots * SLOT_BYTES, flags=mmap.MAP_SHARED, prot=protection)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)

    @classmethod
    def create(cls, num_slots: int) -> tuple[SharedRing, int]:
        """A sender's new ring, and the descriptor to hand over, which is the caller's to close. Raises ``OSError``."""
        assert 1 <= num_slots <= MAX_SLOTS
        file = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, num_slots * SLOT_BYTES)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            return cls(file, num_slots, is_writable=True), file
        except BaseException:
            os.close(file)
            raise

    @classmethod
    def open(cls, file: int, num_slots: int) -> SharedRing:
        """A receiver's view of the ring behind a descriptor that came from a peer, which stays the caller's to close.

        Raises ``Refused`` (MALFORMED) for anything that is not a sealed memory file of just this size.
        """
        if not 1 <= num_slots <= MAX_SLOTS:
            raise _malformed(f"A ring of {num_slots} slots is outside 1 to {MAX_SLOTS}.")
        try:
            seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
            num_bytes = os.fstat(file).st_size
        except OSError as error:
            raise _malformed(f"What came for a ring is no memory file ({error.strerror}).") from error
        if seals & _SEALS != _SEALS:
            raise _malformed("The ring's memory file is not sealed against a change of its size.")
        if num_bytes != num_slots * SLOT_BYTES:
            raise _malformed(f"The ring's memory file has {num_bytes} bytes; {num_slots} slots are {num_slots * SLOT_BYTES}.")
        try:
            return cls(file, num_slots, is_writable=False)
        except OSError as error:
            raise _malformed(f"The ring's memory file cannot be mapped ({error.strerror}).") from error

    def write(self, number: int, payload: memoryview) -> None:
        """Copy ``payload`` into the slot of the ``number``-th segment, counted from 0. Lets go of the interpreter meanwhile."""
        np.copyto(self._slot(number, payload.nbytes), np.frombuffer(payload, dtype=np.uint8))

    def read(self, number: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the slot of the ``number``-th segment. Lets go of the interpreter meanwhile."""
        np.copyto(np.frombuffer(buffer, dtype=np.uint8), self._slot(number, buffer.nbytes))

    def close(self) -> None:
        """Unmap it: this end's part of the memory is given up. Idempotent."""
        self._bytes = np.empty(0, dtype=np.uint8)
        self._mapping.close()

    def _slot(self, number: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        assert 0 <= num_bytes <= SLOT_BYTES
        start = number % self.num_slots * SLOT_BYTES
        return self._bytes[start : start + num_bytes]


def _malformed(message: str) -> Refused:
    return Refused(RefusalCode.MALFORMED, message)
