"""One attempt's way out of a prefill worker: pushes pages as they come, then commits. It holds no page (its creator does, until
``run`` has ended), computes nothing and chooses no peer.

    AWAITING_PAGES <--> AWAITING_ACCEPTANCE --> AWAITING_ACKNOWLEDGEMENT --> COMMITTED
                             ^                     ^
                             v                     v
                        AWAITING_WAY          AWAITING_WAY

    From every state but the last: --> REFUSED, by the receiver's word, or --> CANCELLED, by ``cancel`` or the task's own end.
    From AWAITING_WAY: --> LOST.

AWAITING_WAY is a way that broke: after a delay the stream is opened again and every page that was not known to be accepted is
sent again, or the commit is repeated. When nothing has got through for ``MAX_BROKEN_S`` the hand-off is LOST, for its router to
lead it elsewhere: the router may reach both workers, and would name the sequence for ever.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from kv_transfer.backoff import Backoff
from kv_transfer.page_frame import MAX_PAYLOAD_BYTES
from kv_transfer.page_transport import PageSource, PageStream, PageTransport, Segment
from kv_transfer.transfer_plan import TransferPlan
from serving_core.clock import Clock
from serving_core.errors import Refused, WorkerLost
from serving_core.ids import PageId
from serving_core.token_event import TokenLogprobs
from serving_core.transfer_ticket import HandoffCommit, TransferTicket

MAX_SEGMENT_BYTES = MAX_PAYLOAD_BYTES
"""Each segment costs both ends some Python, whatever its length: in segments of a quarter, gRPC and torch.distributed took
nearly twice the processor time for a byte."""
MAX_BROKEN_S = 1.0
"""How long after a way broke it is tried again, without anything getting through. That it broke takes two seconds to be noticed
where the peer is silent, and a router that is told has to try its other worker within the five that a client may wait."""


class Committer(Protocol):
    """The way to the decode worker's Commit."""

    async def commit(self, commit: HandoffCommit) -> None:
        """Returns when the decode worker has acknowledged. Safe to repeat.

        Bounded in time by a deadline of its own. Raises ``Refused`` when the decode worker declined, ``WorkerLost`` when no
        answer came.
        """


class HandoffState(enum.Enum):
    """What a hand-off waits for, or how it ended."""

    AWAITING_PAGES = "awaiting_pages"
    """The engine has not computed the next pages yet."""
    AWAITING_ACCEPTANCE = "awaiting_acceptance"
    """Segments are on their way; the receiver has not accepted all of them."""
    AWAITING_WAY = "awaiting_way"
    """The way broke; the next try comes after a delay."""
    AWAITING_ACKNOWLEDGEMENT = "awaiting_acknowledgement"
    """Every page is accepted and the commit is sent."""
    COMMITTED = "committed"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    LOST = "lost"
    """The way stayed broken."""

    @property
    def is_final(self) -> bool:
        return self in (HandoffState.COMMITTED, HandoffState.REFUSED, HandoffState.CANCELLED, HandoffState.LOST)


class OutgoingHandoff:
    """Delivers one (reservation, attempt). Created on the event loop; ``run`` is awaited there once, in a task of its own.

    ``offer`` and ``finish`` belong to the engine thread, ``cancel`` to any thread; none of them blocks. Pages offered must stay
    held until ``run`` has ended, however it ends.
    """

    def __init__(
        self,
        *,
        ticket: TransferTicket,
        plan: TransferPlan,
        source: PageSource,
        transport: PageTransport,
        committer: Committer,
        clock: Clock,
        backoff: Backoff | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        max_segment_bytes: int = MAX_SEGMENT_BYTES,
        max_broken_s: float = MAX_BROKEN_S,
    ) -> None:
        assert plan.destination == ticket.layout
        self._ticket = ticket
        self._plan = plan
        self._source = source
        self._transport = transport
        self._committer = committer
        self._clock = clock
        self._backoff = backoff or Backoff()
        self._sleep = sleep
        self._max_broken_s = max_broken_s
        self._pieces = plan.pieces(max_segment_bytes)
        self._loop = asyncio.get_running_loop()
        self._first_ordinal = ticket.num_cached_tokens // plan.source.page_size
        self._next_ordinal = self._first_ordinal  # engine thread only
        # From here on: event loop only.
        self._pages: list[PageId] = []
        self._num_pages_accepted = ticket.first_page  # of the decode worker, those it has cached included
        self._commit: HandoffCommit | None = None
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False
        self._state = HandoffState.AWAITING_PAGES
        self._finished_at = 0.0
        self._exposed_s: float | None = None
        self._transfer_s = 0.0
        self._num_bytes_sent = 0
        self._num_broken_ways = 0
        self._broken_since: float | None = None  # nothing has got through since then

    @property
    def state(self) -> HandoffState:
        return self._state

    @property
    def num_bytes_sent(self) -> int:
        """Page bytes written to the transport, those sent again counted again."""
        return self._num_bytes_sent

    @property
    def transfer_s(self) -> float:
        """Seconds in which page bytes or the commit were under way: from a segment's start until everything sent by then was
        accepted, and from a commit to its answer. Not those in which the engine computed or a broken way was left alone."""
        return self._transfer_s

    @property
    def exposed_s(self) -> float | None:
        """Seconds from ``finish`` to the acknowledged commit: the part of the hand-off that computing did not hide. None
        until then."""
        return self._exposed_s

    @property
    def hidden_fraction(self) -> float | None:
        """The share of ``transfer_s`` during which the prompt was still being computed, 0 to 1. None until it is acknowledged.

        It is 0 for a prompt of one chunk, and where the wait after a broken way outlasts the transfer.
        """
        if self._exposed_s is None:
            return None
        return max(0.0, 1.0 - self._exposed_s / self._transfer_s) if self._transfer_s > 0 else 0.0

    @property
    def num_broken_ways(self) -> int:
        """How often a page stream or a commit met ``WorkerLost``."""
        return self._num_broken_ways

    def offer(self, pages: Sequence[tuple[int, PageId]]) -> None:
        """These (ordinal, page) are final; ordinals and pages are this worker's. Ordinals run on, without a gap, from the page
        with the first token that the decode worker has not cached.

        Engine thread.
        """
        expected = range(self._next_ordinal, self._next_ordinal + len(pages))
        assert [ordinal for ordinal, _ in pages] == list(expected), "pages are offered in order, each once"
        assert expected.stop <= self._num_source_pages
        self._next_ordinal = expected.stop
        self._on_loop(lambda: self._take_pages(tuple(page_id for _, page_id in pages)))

    def finish(self, token_id: int, logprobs: TokenLogprobs | None, *, num_cached_tokens: int = 0) -> None:
        """Every page was offered and output token 0 is ``token_id``: commit when all is accepted, and say how many tokens of
        the prompt were not computed. Engine thread."""
        assert self._next_ordinal == self._num_source_pages, "finish comes after the last page"
        finished_at = self._clock.now()
        num_pages = self._ticket.num_prompt_pages - self._ticket.first_page
        commit = HandoffCommit(
            reservation_id=self._ticket.reservation_id,
            key=self._ticket.key,
            attempt=self._ticket.attempt,
            token_id=token_id,
            logprobs=logprobs,
            num_bytes_sent=num_pages * self._plan.num_bytes_per_page,
            num_cached_tokens=num_cached_tokens,
        )
        self._on_loop(lambda: self._take_commit(commit, finished_at))

    def cancel(self) -> None:
        """End ``run`` at once, whatever it waits for. Any thread; idempotent; nothing happens once it has ended."""
        self._on_loop(self._cancel)

    async def run(self) -> None:
        """Deliver every page and the commit. Returns once the decode worker has acknowledged.

        Raises ``Refused`` when it declined, ``CancelledError`` after ``cancel``, ``WorkerLost`` when the way stayed broken for
        ``max_broken_s``: what arrived may be complete then, and even the commit.
        """
        assert self._task is None, "a hand-off runs once"
        self._task = asyncio.current_task()
        try:
            if self._is_cancelled:
                raise asyncio.CancelledError
            await self._deliver_pages()
            await self._deliver_commit()
        except Refused:
            self._state = HandoffState.REFUSED
            raise
        except asyncio.CancelledError:
            self._state = HandoffState.CANCELLED
            raise
        except WorkerLost:
            self._state = HandoffState.LOST
            raise
        self._state = HandoffState.COMMITTED

    async def _deliver_pages(self) -> None:
        while not self._is_everything_accepted():
            await self._wait_for_pages()
            try:
                async with self._transport.open(self._ticket) as stream:
                    await self._push(stream)
            except WorkerLost as lost:
                await self._wait_for_way(lost)

    async def _push(self, stream: PageStream) -> None:
        while not self._is_everything_accepted():
            await self._wait_for_pages()
            self._state = HandoffState.AWAITING_ACCEPTANCE
            with self._under_way():
                await self._send_offered(stream)

    async def _send_offered(self, stream: PageStream) -> None:
        ordinal, num_accepted = self._num_pages_accepted, stream.num_accepted
        try:
            while ordinal < self._num_ready_pages:  # more may be offered meanwhile
                await self._send_page(stream, ordinal)
                ordinal += 1
            await stream.flush()
        finally:
            self._note_accepted(stream.num_accepted - num_accepted)

    def _note_accepted(self, num_segments: int) -> None:
        """Of the pages that were sent last, in their order. Also when the way has broken under them: on one that breaks again
        and again, a long prompt gets on none the less."""
        if num_pages := num_segments // len(self._pieces):
            self._num_pages_accepted += num_pages
            self._backoff.reset()
            self._broken_since = None

    async def _send_page(self, stream: PageStream, ordinal: int) -> None:
        payload = self._plan.payload(ordinal, self._ticket.num_prompt_tokens, self._source_page)
        for piece in self._pieces:
            segment = Segment(
                reservation_id=self._ticket.reservation_id,
                attempt=self._ticket.attempt,
                page_ordinal=ordinal,
                offset=piece.offset,
                payload=payload[piece.start : piece.start + piece.num_bytes],
                stride=piece.stride,
            )
            await stream.write(segment)
            self._num_bytes_sent += piece.num_bytes

    def _source_page(self, ordinal: int) -> memoryview:
        return self._source.page_memory(self._pages[ordinal - self._first_ordinal])

    async def _deliver_commit(self) -> None:
        while self._commit is None:
            await self._wait_for_news()
        while True:
            self._state = HandoffState.AWAITING_ACKNOWLEDGEMENT
            try:
                with self._under_way():
                    await self._committer.commit(self._commit)
            except WorkerLost as lost:
                await self._wait_for_way(lost)
            else:
                self._exposed_s = self._clock.now() - self._finished_at
                return

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        started_at = self._clock.now()
        try:
            yield
        finally:
            self._transfer_s += self._clock.now() - started_at

    async def _wait_for_pages(self) -> None:
        while self._num_pages_accepted >= self._num_ready_pages:
            await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        self._state = HandoffState.AWAITING_PAGES
        self._has_news.clear()
        await self._has_news.wait()

    async def _wait_for_way(self, lost: WorkerLost) -> None:
        """Raises ``lost`` when it is the last that was needed."""
        self._state = HandoffState.AWAITING_WAY
        self._num_broken_ways += 1
        now = self._clock.now()
        self._broken_since = now if self._broken_since is None else self._broken_since
        if now - self._broken_since >= self._max_broken_s:
            raise lost
        await self._sleep(self._backoff.next_delay_s())

    def _is_everything_accepted(self) -> bool:
        return self._num_pages_accepted == self._ticket.num_prompt_pages

    @property
    def _num_source_pages(self) -> int:
        return self._plan.source.num_pages_for(self._ticket.num_prompt_tokens)

    @property
    def _num_ready_pages(self) -> int:
        """Pages of the decode worker whose tokens are all in pages offered, and those it has cached."""
        num_offered = self._first_ordinal + len(self._pages)
        return self._plan.num_ready_pages(num_offered, self._ticket.num_prompt_tokens)

    def _take_pages(self, pages: tuple[PageId, ...]) -> None:
        self._pages.extend(pages)
        self._has_news.set()

    def _take_commit(self, commit: HandoffCommit, finished_at: float) -> None:
        self._commit = commit
        self._finished_at = finished_at
        self._has_news.set()

    def _cancel(self) -> None:
        if self._is_cancelled or self._state.is_final:
            return
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _on_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, which has ended ``run``: nothing is left to tell
            self._loop.call_soon_threadsafe(call)
