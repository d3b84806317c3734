"""A worker as the router sees it: a real gRPC server and a real link, whose answers and events the test decides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from serving_core.errors import RefusalCode, Refused
from serving_core.ids import Incarnation, PageId, RequestId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.page_state import PageOwner, PageRecord, PagesSnapshot, PageState
from serving_core.rpc.channel import make_server, open_channel
from serving_core.rpc.convert import (
    event_to_pb,
    hello_to_pb,
    key_from_pb,
    pages_to_pb,
    refusal_from_pb,
    refusal_to_pb,
    request_from_pb,
    status_to_pb,
    ticket_from_pb,
    ticket_to_pb,
)
from serving_core.rpc.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_link_pb2,
    router_link_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from serving_core.token_event import FailureKind, FinishReason, SequenceEvent, SequenceEvicted, SequenceFailed, TokenEvent
from serving_core.transfer_ticket import TransferTicket
from serving_core.worker_status import MetricFamily, PhaseName, WorkerHello, WorkerStatus

LAYOUT = KVPageLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_size=4, dtype=KVDType.FLOAT32)
OTHER_LAYOUT = KVPageLayout(num_layers=3, num_kv_heads=1, head_dim=8, page_size=4, dtype=KVDType.FLOAT32)


def make_hello(
    worker_id: str,
    phases: set[PhaseName],
    *,
    address: str = "127.0.0.1:1",
    incarnation: str = "first",
    model_name: str = "tiny",
    model_print: str = "print-a",
    prefill_arithmetic: str = "exact",
    decode_arithmetic: str = "exact",
    layout: KVPageLayout = LAYOUT,
    num_pages: int = 16,
    max_num_seqs: int = 8,
    max_prefill_tokens_per_step: int = 8,
) -> WorkerHello:
    return WorkerHello(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        phases=frozenset(phases),
        address=address,
        node="here",
        pids=(4711,),
        tensor_parallel_size=1,
        model_name=model_name,
        model_print=model_print,
        prefill_arithmetic=prefill_arithmetic,
        decode_arithmetic=decode_arithmetic,
        layout=layout,
        num_pages=num_pages,
        max_model_len=64,
        max_num_seqs=max_num_seqs,
        max_prefill_tokens_per_step=max_prefill_tokens_per_step,
    )


def make_status(*, is_draining: bool = False, metrics: tuple[MetricFamily, ...] = ()) -> WorkerStatus:
    return WorkerStatus(
        num_running=1,
        num_waiting=2,
        is_draining=is_draining,
        metrics=metrics,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReserve:
    key: SequenceKey
    attempt: int
    output_token_ids: tuple[int, ...]
    num_evictions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStart:
    key: SequenceKey
    ticket: TransferTicket
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRelease:
    phase: PhaseName
    key: SequenceKey
    attempt: int


class FakeWorker(decode_pb2_grpc.DecodeServicer, prefill_pb2_grpc.PrefillServicer, worker_pb2_grpc.WorkerServicer):
    """Grants every Reserve and takes every Start unless told otherwise, and writes down what it is asked.

    ``refusals`` are used up first, one a Reserve; ``start_refusals`` likewise. While ``answers`` is cleared, no call but
    Release is answered. ``on_start`` is called with each Start that is taken, ``on_renewal`` with each renewal. While it
    ``is_stuck`` it dials without telling a status.
    """

    def __init__(self, worker_id: str, *phases: PhaseName, **hello_fields: Any) -> None:
        self.worker_id = worker_id
        self.phases = set(phases)
        self.refusals: list[RefusalCode] = []
        self.start_refusals: list[RefusalCode] = []
        self.on_start: Callable[[SeenStart], None] | None = None
        self.on_renewal: Callable[[FakeWorker, frozenset[SequenceKey]], None] | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.reserves: list[SeenReserve] = []
        self.starts: list[SeenStart] = []
        self.releases: list[SeenRelease] = []
        self.renewals: list[frozenset[SequenceKey]] = []
        self.is_stuck = False
        self.was_welcome = False
        self.refused: Refused | None = None
        self._hello_fields = hello_fields
        self._seen = asyncio.Condition()
        self._outbox: asyncio.Queue[router_link_pb2.WorkerMessage | None] = asyncio.Queue()
        self._server = make_server()
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._address = ""

    # -- life -------------------------------------------------------------------------------------------------------------

    async def join(self, router_address: str, **hello_fields: Any) -> FakeWorker:
        """Serve (once), dial, say hello and a first status, and wait for the answer."""
        if not self._address:
            decode_pb2_grpc.add_DecodeServicer_to_server(self, self._server)
            prefill_pb2_grpc.add_PrefillServicer_to_server(self, self._server)
            worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
            self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
            await self._server.start()
        fields = {**self._hello_fields, **hello_fields}
        hello = make_hello(self.worker_id, self.phases, address=self._address, **fields)
        self._channel = open_channel(router_address)
        self._outbox = asyncio.Queue()
        self._outbox.put_nowait(router_link_pb2.WorkerMessage(hello=hello_to_pb(hello)))
        if not self.is_stuck:
            self.say(make_status())
        self._call = router_link_pb2_grpc.RouterLinkStub(self._channel).Connect(self._messages())
        answer = await self._call.read()
        if answer.WhichOneof("message") == "refusal":
            self.refused = refusal_from_pb(answer.refusal)
        else:
            self.was_welcome = True
        self._reading = asyncio.create_task(self._read())
        return self

    async def hang_up(self) -> None:
        """End the link, abruptly; the server goes on."""
        if self._call is not None:
            self._call.cancel()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    async def link_ended(self) -> None:
        """Wait until the router has ended the link."""
        assert self._reading is not None
        async with asyncio.timeout(5):
            await asyncio.shield(self._reading)

    async def die(self) -> None:
        """What a kill looks like from outside: link and server are gone."""
        self.answers.set()
        await self.hang_up()
        await self._server.stop(None)

    def releases_of(self, key: SequenceKey) -> list[SeenRelease]:
        return [release for release in self.releases if release.key == key]

    # -- what the test says ------------------------------------------------------------------------------------------------

    def token(self, key: SequenceKey, index: int, *, attempt: int = 1, last: bool = False, token_id: int | None = None) -> None:
        """Token ids are 100 + index unless given."""
        finish = FinishReason.LENGTH if last else None
        chosen = 100 + index if token_id is None else token_id
        self.emit(TokenEvent(key=key, attempt=attempt, index=index, token_id=chosen, finish_reason=finish))

    def failed(self, key: SequenceKey, *, attempt: int = 1, kind: FailureKind = FailureKind.HANDOFF) -> None:
        self.emit(SequenceFailed(key=key, attempt=attempt, kind=kind, message="the way broke"))

    def evict(self, key: SequenceKey, *, attempt: int = 1) -> None:
        self.emit(SequenceEvicted(key=key, attempt=attempt))

    def emit(self, *events: SequenceEvent) -> None:
        step = router_link_pb2.StepEvents(events=[event_to_pb(event) for event in events])
        self._outbox.put_nowait(router_link_pb2.WorkerMessage(step=step))

    def say(self, status: WorkerStatus) -> None:
        self._outbox.put_nowait(router_link_pb2.WorkerMessage(status=status_to_pb(status)))

    def send(self, message: router_link_pb2.WorkerMessage) -> None:
        self._outbox.put_nowait(message)

    async def saw(self, condition: Callable[[FakeWorker], bool], within_s: float = 5.0) -> None:
        """Wait until ``condition`` holds for this worker."""
        async with asyncio.timeout(within_s), self._seen:
            await self._seen.wait_for(lambda: condition(self))

    # -- what the router asks ----------------------------------------------------------------------------------------------

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveReply:  # noqa: N802
        asked = request_from_pb(request.request)
        seen = SeenReserve(
            key=asked.key,
            attempt=request.attempt,
            output_token_ids=asked.output_token_ids,
            num_evictions=request.num_evictions,
        )
        self.reserves.append(seen)
        await self._tell_seen()
        await self.answers.wait()
        if self.refusals:
            refused = Refused(self.refusals.pop(0), "not now")
            return decode_pb2.ReserveReply(refusal=refusal_to_pb(refused))
        ticket = TransferTicket(
            reservation_id=ReservationId("0" * 32),
            key=asked.key,
            attempt=request.attempt,
            decode_worker_id=WorkerId(self.worker_id),
            decode_incarnation=Incarnation("first"),
            decode_address=self._address,
            layout=LAYOUT,
            num_prompt_tokens=asked.num_prompt_tokens,
            num_cached_tokens=0,
            lease_s=1.0,
        )
        return decode_pb2.ReserveReply(ticket=ticket_to_pb(ticket))

    async def Commit(self, request: decode_pb2.CommitRequest, context: Any) -> decode_pb2.CommitReply:  # noqa: N802
        raise AssertionError("the router never commits")

    async def Start(self, request: prefill_pb2.StartRequest, context: Any) -> prefill_pb2.StartReply:  # noqa: N802
        asked = request_from_pb(request.request)
        ticket = ticket_from_pb(request.ticket)
        seen = SeenStart(key=asked.key, ticket=ticket, output_token_ids=asked.output_token_ids)
        self.starts.append(seen)
        await self._tell_seen()
        await self.answers.wait()
        if self.start_refusals:
            return prefill_pb2.StartReply(refusal=refusal_to_pb(Refused(self.start_refusals.pop(0), "not now")))
        if self.on_start is not None:
            self.on_start(seen)
        return prefill_pb2.StartReply()

    async def Release(self, request: Any, context: Any) -> Any:  # noqa: N802 - of both services, told apart by the message
        is_decode = isinstance(request, decode_pb2.DecodeReleaseRequest)
        phase = PhaseName.DECODE if is_decode else PhaseName.PREFILL
        self.releases.append(SeenRelease(phase=phase, key=key_from_pb(request.key), attempt=request.attempt))
        await self._tell_seen()
        return decode_pb2.DecodeReleaseReply() if is_decode else prefill_pb2.PrefillReleaseReply()

    async def GetPages(self, request: worker_pb2.GetPagesRequest, context: Any) -> worker_pb2.PagesSnapshot:  # noqa: N802
        await self.answers.wait()
        counts = dict.fromkeys(PageState, 0)
        counts[PageState.FREE], counts[PageState.USED] = 15, 1
        owner = PageOwner(key=make_key("r"), attempt=1)
        page = PageRecord(page_id=PageId(3), generation=2, state=PageState.USED, owners=(owner,), age_s=0.5)
        pages = () if request.is_summary else (page,)
        return pages_to_pb(PagesSnapshot(page_size=4, num_pages=16, counts=counts, pages=pages))

    # -- the link ----------------------------------------------------------------------------------------------------------

    async def _messages(self) -> AsyncIterator[router_link_pb2.WorkerMessage]:
        while (message := await self._outbox.get()) is not None:
            yield message

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while isinstance(message := await self._call.read(), router_link_pb2.RouterMessage):
                if message.WhichOneof("message") == "renewal":
                    self.renewals.append(frozenset(map(key_from_pb, message.renewal.keys)))
                    if self.on_renewal is not None:
                        self.on_renewal(self, self.renewals[-1])
                    await self._tell_seen()

    async def _tell_seen(self) -> None:
        async with self._seen:
            self._seen.notify_all()


def make_key(request_id: str, choice_index: int = 0) -> SequenceKey:
    return SequenceKey(RequestId(request_id), choice_index)
