"""Many token ids as one plain value: immutable, equal by content, copied and read as a block of memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PackedIds:
    """``data`` holds the ids as int32, one after another, in the machine's own byte order."""

    data: bytes

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> PackedIds:
        """Pack ids from 0 to 2**31 - 1. An ``array("i")`` is copied as it lies, in a microsecond for thousands of ids."""
        packed = token_ids if isinstance(token_ids, array) and token_ids.typecode == "i" else array("i", token_ids)
        return cls(packed.tobytes())

    def __len__(self) -> int:
        return len(self.data) // 4

    def numpy(self) -> npt.NDArray[np.int32]:
        """The ids, not copied and read-only."""
        return np.frombuffer(self.data, dtype=np.int32)


NO_IDS = PackedIds(b"")
