"""The streams of a page path on which one attempt follows another, because making one takes longer than most of what is sent
through it. Knows neither what they are made of nor what they carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kv_transfer.page_transport import PageStream
from serving_core.errors import WorkerLost
from serving_core.ids import Incarnation
from serving_core.transfer_ticket import TransferTicket


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where a ticket's pages go: one life of a decode worker."""

    address: str
    incarnation: Incarnation

    @classmethod
    def of(cls, ticket: TransferTicket) -> Receiver:
        return cls(ticket.decode_address, ticket.decode_incarnation)

    @property
    def host(self) -> str:
        """Without the port."""
        return self.address.rpartition(":")[0]


class PooledStream(PageStream, Protocol):
    """A ``PageStream`` to one receiver."""

    @property
    def receiver(self) -> Receiver: ...

    @property
    def is_settled(self) -> bool:
        """Fit for another attempt: everything written was accepted and nothing has gone wrong."""

    async def release(self) -> None:
        """End it, whatever is under way. Idempotent."""


S = TypeVar("S", bound=PooledStream)


class StreamPool(Generic[S]):
    """Lends each stream to one attempt at a time. Lives on one event loop.

    ``connect`` makes a new one, and raises ``WorkerLost`` when there cannot be any. At most ``max_idle`` wait for another
    attempt; one on which anything went wrong is released, and the next attempt makes another.
    """

    def __init__(self, connect: Callable[[TransferTicket], Awaitable[S]], *, max_idle: int) -> None:
        self._connect = connect
        self._max_idle = max_idle
        self._idle: list[S] = []  # in order of last use
        self._in_use: set[S] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @asynccontextmanager
    async def use(self, ticket: TransferTicket) -> AsyncIterator[S]:
        """A stream to the ticket's decode worker. Raises ``WorkerLost`` like ``connect``, and once the pool is closed."""
        if self._is_closed:
            raise WorkerLost(f"The way to {ticket.decode_address} is closed because this worker is stopping.")
        stream = self._take_idle(Receiver.of(ticket)) or await self._connect(ticket)
        self._in_use.add(stream)
        try:
            yield stream
        finally:
            self._in_use.discard(stream)
            self._give_back(stream)

    def release(self, releasing: Coroutine[None, None, None]) -> None:
        """Run it in a task of its own, which ``close`` waits for: whoever gives a stream back may be cancelled, and it must
        still end."""
        release = asyncio.create_task(releasing)
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def close(self, timeout_s: float | None = None) -> None:
        """Release every stream; those in use raise ``WorkerLost``. Waits for that, at most for ``timeout_s``. Idempotent."""
        self._is_closed = True
        streams = [*self._idle, *self._in_use]
        self._idle.clear()
        for stream in streams:
            self.release(stream.release())
        if self._releases:
            await asyncio.wait(self._releases, timeout=timeout_s)

    def _take_idle(self, receiver: Receiver) -> S | None:
        for stream in self._idle:
            if not stream.is_settled:
                self.release(stream.release())
        self._idle = [stream for stream in self._idle if stream.is_settled]
        found = next((stream for stream in self._idle if stream.receiver == receiver), None)
        if found is not None:
            self._idle.remove(found)
        return found

    def _give_back(self, stream: S) -> None:
        if not stream.is_settled or self._is_closed:
            self.release(stream.release())
            return
        self._idle.append(stream)
        while len(self._idle) > self._max_idle:
            self.release(self._idle.pop(0).release())
