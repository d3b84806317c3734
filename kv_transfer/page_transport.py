"""The seam between a prefill worker's pages and a decode worker's pool. Three narrow protocols; every back end implements
``PageTransport`` and is served the other two. A sender never writes into a receiver's pool: segments arrive in a buffer of the
receiver's own, which checks them and copies.

Life of one attempt: 1. open a stream for the ticket; 2. write segments, each answered by the receiver; 3. close.
The commit goes over the Decode service, not over the page path, so it is the same for every back end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from serving_core.byte_stride import ByteStride
from serving_core.ids import PageId, ReservationId
from serving_core.transfer_ticket import TransferTicket

_Element = TypeVar("_Element", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Part of one destination page of one attempt, on its way.

    ``page_ordinal`` counts the sequence's pages at the receiver from 0; ``offset`` is in bytes within that page. The payload
    lies there in one piece or, with a ``stride``, in runs, which it fills wholly. It is borrowed: the sender's memory on the
    way out, the transport's receive buffer on the way in; whoever wants to keep it copies.
    """

    reservation_id: ReservationId
    attempt: int
    page_ordinal: int
    offset: int
    payload: memoryview
    stride: ByteStride | None = None

    @property
    def end(self) -> int:
        """Offset in the page behind the segment's last byte."""
        return self.offset + (self.stride.extent(self.payload.nbytes) if self.stride else self.payload.nbytes)

    def place_in(self, page: NDArray[_Element]) -> NDArray[_Element]:
        """A view of the segment's place in an array with one element for each byte of the page: [num_bytes], or with a stride
        [num_runs, run_bytes]. The segment ends within the page."""
        assert 0 <= self.offset < self.end <= len(page)
        place = page[self.offset : self.end]
        if self.stride is None:
            return place
        shape = (self.stride.num_runs(self.payload.nbytes), self.stride.run_bytes)
        return as_strided(place, shape, (self.stride.step_bytes * page.itemsize, page.itemsize))


class PageSource(Protocol):
    """The sender's pool."""

    def page_memory(self, page_id: PageId) -> memoryview:
        """The page's bytes, contiguous and read-only, without a copy where they lie in host memory. Valid while the page is
        held for sending."""


class PageSink(Protocol):
    """The receiver's end of the page path, one per decode worker."""

    async def accept(self, segments: Sequence[Segment]) -> None:
        """Copy checked segments into the pages their reservation names; all of one reservation and attempt.

        Raises ``Refused`` (STALE_ATTEMPT, UNKNOWN_RESERVATION, LEASE_EXPIRED, MALFORMED) and then touches no page.
        """


class PageStream(Protocol):
    """The way to one decode worker for one attempt."""

    @property
    def num_accepted(self) -> int:
        """Segments that the receiver has accepted, in the order in which they were written. Counts on from attempt to attempt
        where a back end keeps its streams; still there when the way has broken."""

    async def write(self, segment: Segment) -> None:
        """Send one segment, once there is a credit for it. It need not be answered when this returns.

        Raises ``Refused`` when the receiver declined this or an earlier segment, ``WorkerLost`` when the way broke.
        """

    async def flush(self) -> None:
        """Wait until every segment written has been accepted. Raises like ``write``."""


class PageTransport(Protocol):
    """One back end, sending side."""

    name: str

    def open(self, ticket: TransferTicket) -> AbstractAsyncContextManager[PageStream]:
        """A stream for one attempt. Leaving the context releases the stream, finished or not.

        Entering it raises ``WorkerLost`` where a back end finds out already then that it does not reach the receiver.
        """

    async def close(self) -> None:
        """Release every channel."""
