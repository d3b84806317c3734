"""A worker's link to a router that we play ourselves, over real gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from serving_core.errors import RefusalCode, Refused
from serving_core.ids import Incarnation, RequestId, RouterId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.rpc.channel import make_server
from serving_core.rpc.convert import event_from_pb, hello_from_pb, key_to_pb, refusal_to_pb, status_from_pb
from serving_core.rpc.v1 import router_link_pb2, router_link_pb2_grpc
from serving_core.token_event import FailureKind, FinishReason, SequenceEvent, SequenceFailed, TokenEvent
from serving_core.worker_status import PhaseName, WorkerHello, WorkerStatus
from twinpool import router_link
from twinpool.router_link import RouterLinks

T = TypeVar("T")

HELLO = WorkerHello(
    worker_id=WorkerId("decode-0"),
    incarnation=Incarnation("i1"),
    phases=frozenset({PhaseName.DECODE}),
    address="127.0.0.1:1",
    node="here",
    pids=(1,),
    tensor_parallel_size=1,
    model_name="tiny",
    model_print="abc",
    prefill_arithmetic="",
    decode_arithmetic="torch float32",
    layout=KVPageLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=16, dtype=KVDType.FLOAT32),
    num_pages=4,
    max_model_len=64,
    max_num_seqs=2,
    max_prefill_tokens_per_step=16,
)
STATUS = WorkerStatus(num_running=1, num_waiting=2, is_draining=False)
KEY = SequenceKey(RequestId("r"))


def event(index: int, finish_reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(key=KEY, attempt=1, index=index, token_id=7, finish_reason=finish_reason)


def large_events(num_events: int) -> list[SequenceFailed]:
    """So large, a megabyte each, that gRPC takes only a few of them for a router that does not read."""
    return [SequenceFailed(key=KEY, attempt=1, kind=FailureKind.INTERNAL, message="x" * 1_000_000)] * num_events


class PlayedRouter(router_link_pb2_grpc.RouterLinkServicer):
    """Answers each hello with the next of ``answers``, the last one again and again, None with silence. Records what comes."""

    def __init__(self, *answers: router_link_pb2.RouterMessage | None) -> None:
        self.answers = list(answers) or [welcome("router-1")]
        self.hellos: list[WorkerHello] = []
        self.statuses: list[WorkerStatus] = []
        self.events: list[SequenceEvent] = []
        self.to_send: asyncio.Queue[router_link_pb2.RouterMessage | None] = asyncio.Queue()
        self.changed = asyncio.Event()
        self.listening = asyncio.Event()
        """Whether anything after the hello is read."""
        self.listening.set()

    async def Connect(  # noqa: N802 - the name is gRPC's
        self, request_iterator: AsyncIterator[router_link_pb2.WorkerMessage], context: object
    ) -> AsyncIterator[router_link_pb2.RouterMessage]:
        self._note(self.hellos, hello_from_pb((await anext(request_iterator)).hello))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.get_running_loop().create_future()
        assert answer is not None
        yield answer
        if answer.WhichOneof("message") != "welcome":
            return
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while (message := await self.to_send.get()) is not None:
                yield message
        finally:
            reading.cancel()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def _read(self, messages: AsyncIterator[router_link_pb2.WorkerMessage]) -> None:
        await self.listening.wait()
        async for message in messages:
            if message.WhichOneof("message") == "status":
                self._note(self.statuses, status_from_pb(message.status))
            else:
                for each in message.step.events:
                    self._note(self.events, event_from_pb(each))

    def _note(self, record: list[T], value: T) -> None:
        record.append(value)
        self.changed.set()


def welcome(router_id: str) -> router_link_pb2.RouterMessage:
    return router_link_pb2.RouterMessage(welcome=router_link_pb2.Welcome(router_id=router_id))


@asynccontextmanager
async def linked(
    router: PlayedRouter,
    renew: Callable[[frozenset[SequenceKey]], None] = lambda keys: None,
    on_status_read: Callable[[], None] = lambda: None,
) -> AsyncIterator[RouterLinks]:
    """Links of one worker to ``router``, running."""

    async def read_status() -> WorkerStatus:
        on_status_read()
        return STATUS

    server = make_server()
    router_link_pb2_grpc.add_RouterLinkServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    links = RouterLinks(addresses=[f"127.0.0.1:{port}"], read_status=read_status, renew=renew)
    running = asyncio.create_task(links.run(HELLO))
    try:
        yield links
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)


async def test_life_of_a_link() -> None:
    router, renewed = PlayedRouter(), asyncio.Queue[frozenset[SequenceKey]]()
    async with linked(router, renewed.put_nowait) as links:
        # 1. hello, then the first status at once
        await router.until(lambda: bool(router.statuses))
        assert router.hellos == [HELLO]
        assert router.statuses[0] == STATUS
        # 2. events arrive in order, from any thread
        thread = threading.Thread(target=lambda: links.emit(RouterId("router-1"), [event(1), event(2)]))
        thread.start()
        thread.join()
        await router.until(lambda: len(router.events) == 2)
        assert router.events == [event(1), event(2)]
        # 3. a renewal reaches the phases
        router.to_send.put_nowait(router_link_pb2.RouterMessage(renewal=router_link_pb2.LeaseRenewal(keys=[key_to_pb(KEY)])))
        async with asyncio.timeout(5):
            assert await renewed.get() == frozenset({KEY})
        # 4. an end changes the load, which is told before the second is over
        num_statuses = len(router.statuses)
        links.emit(RouterId("router-1"), [event(3, FinishReason.STOP)])
        async with asyncio.timeout(0.9):
            await router.until(lambda: len(router.statuses) > num_statuses)


async def test_a_stream_that_ends_is_dialled_again() -> None:
    router = PlayedRouter(welcome("router-1"), welcome("router-2"))
    async with linked(router) as links:
        await router.until(lambda: bool(router.statuses))
        router.to_send.put_nowait(None)
        await router.until(lambda: len(router.hellos) == 2 and len(router.statuses) >= 2)
        # the router is another one now: what was for the first is dropped
        links.emit(RouterId("router-1"), [event(1)])
        links.emit(RouterId("router-2"), [event(2)])
        await router.until(lambda: bool(router.events))
        assert router.events == [event(2)]


async def test_a_refusal_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    refusal = refusal_to_pb(Refused(RefusalCode.MODEL_MISMATCH, "another model is served here"))
    router = PlayedRouter(router_link_pb2.RouterMessage(refusal=refusal), welcome("router-1"))
    async with linked(router):
        await router.until(lambda: bool(router.statuses))
    assert len(router.hellos) == 2
    assert "another model is served here" in caplog.text


async def test_a_router_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_link, "WELCOME_TIMEOUT_S", 0.2)
    router = PlayedRouter(None, welcome("router-1"))
    async with linked(router):
        await router.until(lambda: bool(router.statuses))
    assert len(router.hellos) == 2


async def test_a_router_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_link, "MAX_UNSENT_EVENTS", 20)
    router = PlayedRouter()
    router.listening.clear()
    welcomed = asyncio.Event()
    async with linked(router, on_status_read=welcomed.set) as links:
        # 1. it is alive, but stuck, and so is what is being written to it
        async with asyncio.timeout(5):
            await welcomed.wait()
        for large in large_events(10):
            links.emit(RouterId("router-1"), [large])
        await asyncio.sleep(0.5)  # gRPC takes what it will
        # 2. more events wait for it than may
        links.emit(RouterId("router-1"), [event(index) for index in range(11, 40)])
        await router.until(lambda: len(router.hellos) == 2)
        # 3. what it did not read is gone; when it reads again it is served as before
        router.listening.set()
        await router.until(lambda: bool(router.statuses))
        links.emit(RouterId("router-1"), [event(1)])
        await router.until(lambda: event(1) in router.events)


async def test_statuses_do_not_pile_up_for_a_router_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_link, "STATUS_INTERVAL_S", 0.01)
    reads: list[None] = []
    first_read = asyncio.Event()

    def on_status_read() -> None:
        reads.append(None)
        first_read.set()

    router = PlayedRouter()
    router.listening.clear()
    async with linked(router, on_status_read=on_status_read) as links:
        await router.until(lambda: len(router.hellos) == 1)
        # 1. it is stuck, so that at most one status waits and no other is read
        async with asyncio.timeout(5):
            await first_read.wait()
            for large in large_events(10):
                links.emit(RouterId("router-1"), [large])
            num_reads = 0
            while len(reads) != num_reads:
                num_reads = len(reads)
                await asyncio.sleep(0.1)  # ten statuses' time
        # 2. it reads again: all events, and fresh statuses
        router.listening.set()
        await router.until(lambda: len(router.events) == 10 and len(reads) > num_reads + 1)
    assert len(router.statuses) <= len(reads)


async def test_an_absent_router_costs_nothing_but_its_events() -> None:
    async def read_status() -> WorkerStatus:
        raise AssertionError("nobody is there to be told")

    links = RouterLinks(addresses=["127.0.0.1:9"], read_status=read_status, renew=lambda keys: None)
    running = asyncio.create_task(links.run(HELLO))
    links.emit(RouterId("router-1"), [event(0)])
    await asyncio.sleep(0.3)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_emit_after_the_loop_has_ended_is_a_no_op() -> None:
    async def read_status() -> WorkerStatus:
        return STATUS

    async def make() -> RouterLinks:
        return RouterLinks(addresses=[], read_status=read_status, renew=lambda keys: None)

    links = await asyncio.to_thread(asyncio.run, make())
    links.emit(RouterId("router-1"), [event(0)])
