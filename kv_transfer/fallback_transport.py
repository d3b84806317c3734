"""Chooses for each stream the first of several page transports that reaches the receiver. Moves nothing itself; says and counts
which way was taken, and why no better one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from kv_transfer.page_transport import PageStream, PageTransport
from serving_core.errors import WorkerLost
from serving_core.ids import WorkerId
from serving_core.transfer_ticket import TransferTicket

_log = logging.getLogger(__name__)


class FallbackTransport:
    """``PageTransport`` over ``transports``, the best first; owns them. Lives on one event loop. ``left_out`` says in whole
    sentences why there are no others; it is logged where the first choice was not taken.

    A transport does not reach a receiver when its ``open`` raises ``WorkerLost``. Once a stream is open, it is that one's: what
    breaks later is the user's to open again, and then the choice is made anew.
    """

    def __init__(self, transports: Sequence[PageTransport], *, left_out: str = "") -> None:
        assert transports
        self._left_out = left_out
        self.name = ", ".join(transport.name for transport in transports)
        self._transports = tuple(transports)
        self._num_streams: Counter[str] = Counter()
        self._ways: dict[WorkerId, str | None] = {}

    @property
    def num_streams(self) -> Mapping[str, int]:
        """Streams opened so far, by the name of the transport; 0 for one that was never taken."""
        return self._num_streams

    @asynccontextmanager
    async def open(self, ticket: TransferTicket) -> AsyncIterator[PageStream]:
        """A stream over the first transport that has one. Raises the last one's ``WorkerLost`` when none has."""
        async with AsyncExitStack() as stack:
            yield await self._open_first(ticket, stack)

    async def close(self) -> None:
        """Close every transport. Idempotent."""
        for transport in self._transports:
            await transport.close()

    async def _open_first(self, ticket: TransferTicket, stack: AsyncExitStack) -> PageStream:
        failures: list[WorkerLost] = []
        for transport in self._transports:
            try:
                stream = await stack.enter_async_context(transport.open(ticket))
            except WorkerLost as lost:
                failures.append(lost)
                continue
            self._num_streams[transport.name] += 1
            self._note_way(ticket, transport.name, failures)
            return stream
        self._note_way(ticket, None, failures)
        raise failures[-1]

    def _note_way(self, ticket: TransferTicket, name: str | None, failures: Sequence[WorkerLost]) -> None:
        """Log the way to a worker, once until it changes."""
        if self._ways.get(ticket.decode_worker_id, "") == name:
            return
        self._ways[ticket.decode_worker_id] = name
        reasons = " ".join([*map(str, failures), *([self._left_out] if failures and self._left_out else [])])
        if name is None:
            _log.warning("no way for pages to %s: %s", ticket.decode_worker_id, reasons)
        else:
            _log.info("pages to %s go over %s. %s", ticket.decode_worker_id, name, reasons or "It is the first choice.")
