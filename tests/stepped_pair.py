"""A decode and a prefill worker that run only when a test turns them: real phases, pools, step loops, services and hand-offs,
over any transport, around the fake model of tests.phases. One thread; leases go by a manual clock.

Over loopback nothing but the event loop's own order decides what comes first, so that the same turns give the same outcome.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import grpc

from decode_worker.decode_service import DecodeService
from decode_worker.page_sink import DecodePageSink
from kv_transfer.backoff import Backoff
from kv_transfer.loopback_transport import LoopbackTransport
from kv_transfer.outgoing_handoff import OutgoingHandoff
from kv_transfer.page_transport import PageSink, PageStream, PageTransport, Segment
from kv_transfer.transfer_plan import TransferPlan
from llm_engine.engine_calls import run_between_steps
from llm_engine.phase import Phase, Runner
from llm_engine.step_loop import StepLoop
from prefill_worker.commit_client import CommitClient
from prefill_worker.prefill_service import PrefillService
from serving_core.clock import Clock, ManualClock
from serving_core.errors import WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.ids import Incarnation
from serving_core.kv_page_layout import KVPageLayout
from serving_core.rpc import convert
from serving_core.rpc.channel import make_server
from serving_core.rpc.v1 import prefill_pb2
from serving_core.transfer_ticket import HandoffCommit, TransferTicket
from tests.phases import LAYOUT, ROUTER, DecodeSide, FakeAheadRunner, PrefillSide
from twinpool.page_paths import PagePlace, PageServices, make_transport
from twinpool.transfer_way import TransferWay

MAX_LATE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large things are in a pair. ``way`` None is loopback; then commits go without gRPC as well. ``max_segment_bytes``
    cuts pages, so that they arrive in parts. ``is_ahead``: decode's steps begin before those before them are over."""

    way: TransferWay | None
    prefill_page_size: int
    decode_page_size: int
    num_prefill_pages: int
    num_decode_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_segment_bytes: int
    is_ahead: bool = False

    @property
    def prefill_layout(self) -> KVPageLayout:
        return replace(LAYOUT, page_size=self.prefill_page_size)

    @property
    def decode_layout(self) -> KVPageLayout:
        return replace(LAYOUT, page_size=self.decode_page_size)


class SteppedLoop(StepLoop):
    """Turned by hand in place of its thread."""

    def __init__(self, runner: Runner, phases: Sequence[Phase], clock: Clock) -> None:
        super().__init__(runner=runner, phases=phases, clock=clock, on_crash=_raise)

    def turn(self) -> None:
        """The calls that wait, leases that end, then a step of each phase. Raises whatever would have crashed the worker."""
        self._turn()

    def _sleep(self, until: float | None) -> None:
        """Whoever turns it does that."""


class Turns:
    """Lets tasks wait for turns in place of seconds."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def pass_one(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def sleep(self, _seconds: float) -> None:
        await self._next.wait()


class Faults:
    """Breaks ways and loses the answers of commits, each with a probability, and keeps a few segments and commits that a frozen
    worker may send once more. ``num_broken`` counts what it broke."""

    def __init__(self, chance: random.Random, *, p_break: float) -> None:
        self._chance = chance
        self._p_break = p_break
        self.num_broken = 0
        self.late_segments: list[tuple[TransferTicket, Segment]] = []
        self.late_commits: list[tuple[TransferTicket, HandoffCommit]] = []

    def breaks(self) -> bool:
        is_broken = self._chance.random() < self._p_break
        self.num_broken += is_broken
        return is_broken

    def keep_segment(self, ticket: TransferTicket, segment: Segment) -> None:
        if self._chance.random() < 0.1:
            self.late_segments.append((ticket, replace(segment, payload=memoryview(bytes(segment.payload)))))
            del self.late_segments[:-MAX_LATE]

    def keep_commit(self, ticket: TransferTicket, commit: HandoffCommit) -> None:
        self.late_commits.append((ticket, commit))
        del self.late_commits[:-MAX_LATE]


class FaultyTransport:
    """A transport whose streams break under their users."""

    def __init__(self, inner: PageTransport, faults: Faults) -> None:
        self.inner = inner
        self.name = inner.name
        self._faults = faults

    @asynccontextmanager
    async def open(self, ticket: TransferTicket) -> AsyncIterator[PageStream]:
        async with self.inner.open(ticket) as stream:
            yield cast(PageStream, _FaultyStream(stream, ticket, self._faults))

    async def close(self) -> None:
        await self.inner.close()


class _FaultyStream:
    """What it does not do itself, ``inner`` does."""

    def __init__(self, inner: PageStream, ticket: TransferTicket, faults: Faults) -> None:
        self._inner = inner
        self._ticket = ticket
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def write(self, segment: Segment) -> None:
        self._faults.keep_segment(self._ticket, segment)
        await self._inner.write(segment)
        self._break_perhaps()

    async def flush(self) -> None:
        self._break_perhaps()
        await self._inner.flush()

    def _break_perhaps(self) -> None:
        if self._faults.breaks():
            raise WorkerLost("The way broke.")


class FaultyCommits(CommitClient):
    """Loses commits on their way, or the answers to them. Without ``send`` they go over gRPC."""

    def __init__(self, faults: Faults, send: Callable[[TransferTicket, HandoffCommit], Awaitable[None]] | None = None) -> None:
        super().__init__()
        self._faults = faults
        self.send = send or super().commit

    async def commit(self, ticket: TransferTicket, commit: HandoffCommit) -> None:
        self._faults.keep_commit(ticket, commit)
        if self._faults.breaks():
            raise WorkerLost("The commit was lost.")
        await self.send(ticket, commit)
        if self._faults.breaks():
            raise WorkerLost("The answer was lost.")


class SteppedPrefillService(PrefillService):
    """Whose hand-offs cut pages as they are told, and wait for turns."""

    def __init__(
        self,
        side: PrefillSide,
        loop: StepLoop,
        *,
        transport: PageTransport,
        commits: CommitClient,
        turns: Turns,
        max_segment_bytes: int,
    ) -> None:
        super().__init__(
            phase=side.phase,
            engine=loop,
            layout=side.layout,
            source=side.cache,
            transport=transport,
            clock=side.clock,
            commits=commits,
        )
        self._turns = turns
        self._max_segment_bytes = max_segment_bytes

    def _make_handoff(self, ticket: TransferTicket) -> OutgoingHandoff:
        return OutgoingHandoff(
            ticket=ticket,
            plan=TransferPlan.between(self._layout, ticket.layout),
            source=self._source,
            transport=self._transport,
            committer=self._commits.to(ticket),
            clock=self._clock,
            backoff=Backoff(),
            sleep=self._turns.sleep,
            max_segment_bytes=self._max_segment_bytes,
        )

    @property
    def num_tasks(self) -> int:
        """Of hand-offs that run or begin."""
        return len(self._tasks)

    async def start(self, request: GenerateRequest, ticket: TransferTicket) -> None:
        """As a router asks for it, without gRPC. Raises ``Refused`` or ``WorkerLost``."""
        message = prefill_pb2.StartRequest(
            router_id=ROUTER, request=convert.request_to_pb(request), ticket=convert.ticket_to_pb(ticket)
        )
        reply = await self.Start(message, cast(Any, _DirectCall()))
        if reply.HasField("refusal"):
            raise convert.refusal_from_pb(reply.refusal)


class SteppedDecode:
    """A decode worker with both phases, so that a prompt may take the local path; ``open`` it first. ``close`` is its death."""

    def __init__(self, clock: ManualClock, shape: Shape, turns: Turns, faults: Faults, *, incarnation: str) -> None:
        self._shape = shape
        self.incarnation = Incarnation(incarnation)
        self._server = make_server() if shape.way is not None else None
        address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}" if self._server is not None else "127.0.0.1:1"
        self.side = DecodeSide(
            clock,
            num_pages=shape.num_decode_pages,
            max_num_seqs=shape.max_num_seqs,
            max_waiting=8,
            has_prefix_cache=True,
            incarnation=incarnation,
            address=address,
            layout=shape.decode_layout,
        )
        self.local = PrefillSide(beside=self.side, max_num_batched_tokens=shape.max_num_batched_tokens, has_prefix_cache=True)
        self.phases: tuple[Phase, ...] = (self.side.phase, self.local.phase)
        runner = FakeAheadRunner(self.side.runner) if shape.is_ahead else self.side.runner
        self.loop = SteppedLoop(runner, self.phases, clock)
        self.sink: PageSink = DecodePageSink(phase=self.side.phase, engine=self.loop)
        self.local_service = SteppedPrefillService(
            self.local,
            self.loop,
            transport=LoopbackTransport({}),
            commits=FaultyCommits(faults),
            turns=turns,
            max_segment_bytes=shape.max_segment_bytes,
        )
        self._address = address
        self._page_services: PageServices | None = None

    async def open(self) -> None:
        if self._server is None or self._shape.way is None:
            return
        place = PagePlace(way=self._shape.way, host="127.0.0.1", device="cpu", is_fabric_trusted=False)
        self._page_services = PageServices(self.sink, place=place, server=self._server)
        DecodeService(phase=self.side.phase, engine=self.loop).add_to_server(self._server)
        self._page_services.start(self._address, self.incarnation)
        await self._server.start()

    async def close(self) -> None:
        """Everything that came from it ends, and what was asked of it stays unanswered. Idempotent."""
        self.loop.stop(0.0)
        await self.local_service.close()
        if self._page_services is not None:
            await self._page_services.close()
        if self._server is not None:
            await self._server.stop(None)


class SteppedPrefill:
    """A prefill worker; ``close`` is its death. ``find`` gives the decode worker that serves now, for loopback."""

    def __init__(
        self, clock: ManualClock, shape: Shape, turns: Turns, faults: Faults, *, find: Callable[[], SteppedDecode]
    ) -> None:
        self._find = find
        self.side = PrefillSide(
            clock,
            num_pages=shape.num_prefill_pages,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            has_prefix_cache=True,
            layout=shape.prefill_layout,
        )
        self.loop = SteppedLoop(self.side.runner, [self.side.phase], clock)
        if shape.way is None:
            decode_id = find().side.phase.worker_id
            inner: PageTransport = LoopbackTransport({decode_id: _SinkOfNow(find)})
            commits = FaultyCommits(faults, self._commit_in_process)
        else:
            place = PagePlace(way=shape.way, host="127.0.0.1", device="cpu", is_fabric_trusted=False)
            inner = make_transport(place, clock)
            commits = FaultyCommits(faults)
        self.transport = FaultyTransport(inner, faults)
        self.commits = commits
        self.service = SteppedPrefillService(
            self.side,
            self.loop,
            transport=self.transport,
            commits=commits,
            turns=turns,
            max_segment_bytes=shape.max_segment_bytes,
        )

    async def close(self) -> None:
        """Idempotent."""
        self.loop.stop(0.0)
        await self.service.close()
        await self.transport.close()

    async def _commit_in_process(self, ticket: TransferTicket, commit: HandoffCommit) -> None:
        decode = self._find()
        if decode.incarnation != ticket.decode_incarnation:
            raise WorkerLost("That incarnation of the decode worker is gone.")
        await run_between_steps(decode.loop, lambda: decode.side.phase.commit(commit))


class _SinkOfNow:
    """Of whatever worker serves now: one that has no such reservation says so."""

    def __init__(self, find: Callable[[], SteppedDecode]) -> None:
        self._find = find

    async def accept(self, segments: Sequence[Segment]) -> None:
        await self._find().sink.accept(segments)


class _DirectCall:
    """The one thing that a unary method here asks of gRPC's context."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise WorkerLost(f"{code.name}: {details}")


def _raise(error: BaseException) -> None:
    raise error
