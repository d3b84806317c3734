"""Which bytes of one attempt have arrived. Pure accounting: it holds no page, no payload and no lease.

A segment is known by its extent (page ordinal, offset, length). The same extent may come again, since a sender whose way broke
sends once more what it was not answered for; any other overlap means that two senders cut differently, and is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kv_transfer.page_transport import Segment
from serving_core.errors import RefusalCode, Refused
from serving_core.kv_page_layout import KVPageLayout


class ReceiveLedger:
    """Expects every byte of the pages with ordinals ``first_page .. first_page + num_pages - 1`` in ``layout``.

    Invariant: the extents recorded for one page are disjoint, non-empty and inside the page.
    """

    def __init__(self, layout: KVPageLayout, first_page: int, num_pages: int) -> None:
        assert first_page >= 0
        assert num_pages >= 0
        self._page_bytes = layout.page_bytes
        self._first_page = first_page
        self._pages = [_PageExtents() for _ in range(num_pages)]
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

        All or nothing: raises ``Refused`` (MALFORMED) for a segment outside the expected pages, an empty one, or one that
        overlaps another without being the same, and has then recorded none of them.
        """
        new: list[Segment] = []
        try:
            for segment in segments:
                if self._insert(segment):
                    new.append(segment)
        except Refused:
            for segment in new:
                self._remove(segment)
            raise
        return tuple(new)

    def _insert(self, segment: Segment) -> bool:
        num_bytes = segment.payload.nbytes
        index = segment.page_ordinal - self._first_page
        if not 0 <= index < len(self._pages):
            last = self._first_page + len(self._pages) - 1
            raise _malformed(f"Page {segment.page_ordinal} is not expected; this attempt sends {self._first_page} to {last}.")
        if not (num_bytes >= 1 and 0 <= segment.offset <= self._page_bytes - num_bytes):
            raise _malformed(
                f"A segment of {num_bytes} bytes at offset {segment.offset} must hold at least one byte and end within the "
                f"page's {self._page_bytes}."
            )
        if not self._pages[index].insert(segment.offset, num_bytes):
            return False
        self._num_bytes_received += num_bytes
        return True

    def _remove(self, segment: Segment) -> None:
        self._pages[segment.page_ordinal - self._first_page].remove(segment.offset)
        self._num_bytes_received -= segment.payload.nbytes


class _PageExtents:
    """The extents that arrived for one page, sorted by offset."""

    __slots__ = ("_lengths", "_offsets")

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._lengths: list[int] = []

    def insert(self, offset: int, length: int) -> bool:
        at = bisect_left(self._offsets, offset)
        if at < len(self._offsets) and self._offsets[at] == offset and self._lengths[at] == length:
            return False
        reaches_next = at < len(self._offsets) and offset + length > self._offsets[at]
        inside_previous = at > 0 and self._offsets[at - 1] + self._lengths[at - 1] > offset
        if reaches_next or inside_previous:
            raise _malformed(f"A segment of {length} bytes at offset {offset} overlaps one that arrived with another extent.")
        self._offsets.insert(at, offset)
        self._lengths.insert(at, length)
        return True

    def remove(self, offset: int) -> None:
        at = bisect_left(self._offsets, offset)
        del self._offsets[at], self._lengths[at]


def _malformed(message: str) -> Refused:
    return Refused(RefusalCode.MALFORMED, message)
