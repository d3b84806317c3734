"""Which bytes of one attempt have arrived. Pure accounting: it holds no page, no payload and no lease.

Bytes may come again, since a sender whose way broke sends once more what it was not answered for. A segment of which only a
part has arrived means that two senders cut differently, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.page_transport import Segment
from serving_core.errors import RefusalCode, Refused
from serving_core.kv_page_layout import KVPageLayout


class ReceiveLedger:
    """Expects every byte of the pages with ordinals ``first_page .. first_page + num_pages - 1`` in ``layout``, the receiver's:
    in the last page also those behind the prompt's last token. From one source or from several."""

    def __init__(self, layout: KVPageLayout, first_page: int, num_pages: int) -> None:
        assert first_page >= 0
        assert num_pages >= 0
        self._page_bytes = layout.page_bytes
        self._first_page = first_page
        self._pages = [_PageArrival(layout.page_bytes) for _ in range(num_pages)]
        self._num_bytes_received = 0

    @property
    def num_bytes_expected(self) -> int:
        return len(self._pages) * self._page_bytes

    @property
    def num_bytes_received(self) -> int:
        """Distinct bytes; a segment that came twice counts once."""
        return self._num_bytes_received

    @property
    def is_complete(self) -> bool:
        return self._num_bytes_received == self.num_bytes_expected

    def add(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Record ``segments`` and return those whose bytes are new and so have to be copied, in the same order.

        All or nothing: raises ``Refused`` (MALFORMED) for a segment outside the expected pages, an empty one, or one of which
        only a part is new, and has then recorded none of them.
        """
        new: list[Segment] = []
        try:
            for segment in segments:
                if self._page_of(segment).insert(segment):
                    new.append(segment)
        except Refused:
            for segment in reversed(new):
                self._page_of(segment).remove(segment)
            raise
        for segment in new:
            self._page_of(segment).forget_flags_if_whole()
            self._num_bytes_received += segment.payload.nbytes
        return tuple(new)

    def _page_of(self, segment: Segment) -> _PageArrival:
        index = segment.page_ordinal - self._first_page
        if not 0 <= index < len(self._pages):
            last = self._first_page + len(self._pages) - 1
            raise _malformed(f"Page {segment.page_ordinal} is not expected; this attempt sends {self._first_page} to {last}.")
        return self._pages[index]


class _PageArrival:
    """Which bytes of one page are there: the first ``_num_there`` of them, or once another came those that are flagged."""

    __slots__ = ("_flags", "_num_there", "_page_bytes")

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._num_there = 0
        self._flags: NDArray[np.bool_] | None = None  # [page_bytes]

    def insert(self, segment: Segment) -> bool:
        """Whether the segment is new. Raises ``Refused`` for one that does not fit."""
        num_bytes = segment.payload.nbytes
        if not (num_bytes >= 1 and segment.offset >= 0 and segment.end <= self._page_bytes):
            raise _malformed(
                f"A segment of {num_bytes} bytes at offset {segment.offset} must hold at least one byte and end within the "
                f"page's {self._page_bytes}."
            )
        if self._flags is None:
            if segment.end <= self._num_there:
                return False
            if segment.stride is None and segment.offset == self._num_there:
                self._num_there += num_bytes
                return True
            self._flags = np.zeros(self._page_bytes, dtype=np.bool_)
            self._flags[: self._num_there] = True
        place = segment.place_in(self._flags)
        num_known = np.count_nonzero(place)
        if num_known == num_bytes:
            return False
        if num_known:
            raise _malformed(
                f"Of a segment of {num_bytes} bytes at offset {segment.offset}, {num_known} have arrived in a segment that was "
                f"cut otherwise."
            )
        place[...] = True
        self._num_there += num_bytes
        return True

    def remove(self, segment: Segment) -> None:
        """Undo the latest ``insert`` that is not undone yet."""
        if self._flags is not None:
            segment.place_in(self._flags)[...] = False
        self._num_there -= segment.payload.nbytes

    def forget_flags_if_whole(self) -> None:
        if self._num_there == self._page_bytes:
            self._flags = None


def _malformed(message: str) -> Refused:
    return Refused(RefusalCode.MALFORMED, message)
