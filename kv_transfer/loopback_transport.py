"""A page transport inside one process: the tests' fake, under the same contract suite as every real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from kv_transfer.page_transport import PageSink, PageStream, Segment
from serving_core.errors import Refused, WorkerLost
from serving_core.ids import WorkerId
from serving_core.transfer_ticket import TransferTicket


class LoopbackTransport:
    """Hands each segment to the sink of the ticket's decode worker. A worker taken out of ``sinks`` counts as lost."""

    name = "loopback"

    def __init__(self, sinks: Mapping[WorkerId, PageSink], *, stall_timeout_s: float = 5.0) -> None:
        self._sinks = sinks
        self._stall_timeout_s = stall_timeout_s

    @asynccontextmanager
    async def open(self, ticket: TransferTicket) -> AsyncIterator[PageStream]:
        yield _LoopbackStream(self._sinks, ticket.decode_worker_id, self._stall_timeout_s)

    async def close(self) -> None:
        pass


class _LoopbackStream:
    def __init__(self, sinks: Mapping[WorkerId, PageSink], worker_id: WorkerId, stall_timeout_s: float) -> None:
        self._sinks = sinks
        self._worker_id = worker_id
        self._stall_timeout_s = stall_timeout_s
        self._end: Refused | WorkerLost | None = None
        self.num_accepted = 0

    async def write(self, segment: Segment) -> None:
        sink = self._sinks.get(self._worker_id)
        if self._end is None and sink is None:
            self._end = WorkerLost(f"{self._worker_id} is gone.")
        if self._end is None and sink is not None:
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await sink.accept([segment])
                self.num_accepted += 1
            except Refused as refusal:
                self._end = refusal
            except TimeoutError:
                self._end = WorkerLost(f"{self._worker_id} accepted no page bytes for {self._stall_timeout_s} s.")
        await self.flush()

    async def flush(self) -> None:
        """Nothing is under way between two writes."""
        if self._end is not None:
            raise self._end
