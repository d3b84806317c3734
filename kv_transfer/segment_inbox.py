"""Segments of one stream between the one who reads and checks them and the one who hands them to the sink. Bounded, so that a
sink that takes its time holds the sender and not the memory."""

from __future__ import annotations

import asyncio
from collections import deque

from kv_transfer.page_transport import Segment


class SegmentInbox:
    """One reader puts, one other task takes. At most ``max_segments`` wait."""

    def __init__(self, max_segments: int) -> None:
        assert max_segments >= 1
        self._max_segments = max_segments
        self._segments: deque[Segment] = deque()
        self._has_ended = False
        self._changed = asyncio.Event()

    async def put(self, segment: Segment) -> None:
        """Waits while the inbox is full: from then on the reader reads nothing, and flow control holds the sender."""
        while len(self._segments) == self._max_segments:
            await self._change()
        self._segments.append(segment)
        self._changed.set()

    def end(self) -> None:
        """Nothing more is put. Idempotent."""
        self._has_ended = True
        self._changed.set()

    async def take(self) -> list[Segment]:
        """Everything that is there, at least one segment; nothing once the stream has ended."""
        while not self._segments and not self._has_ended:
            await self._change()
        taken = list(self._segments)
        self._segments.clear()
        self._changed.set()
        return taken

    async def _change(self) -> None:
        # One event serves both ends: the inbox cannot be full and empty at once, so only one of them ever waits.
        self._changed.clear()
        await self._changed.wait()
