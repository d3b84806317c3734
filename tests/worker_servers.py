"""A prefill and a decode worker as real gRPC servers on loopback with real engine threads, around the fakes of tests.phases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from decode_worker.decode_phase import DecodePhase
from decode_worker.decode_service import DecodeService
from decode_worker.page_sink import DecodePageSink
from kv_transfer.grpc_page_service import GrpcPageService
from kv_transfer.grpc_page_transport import GrpcPageTransport
from llm_engine.engine_calls import run_between_steps
from llm_engine.page_pool import PagePool
from llm_engine.phase import Phase
from llm_engine.step_loop import StepLoop
from llm_engine.token_rules import TokenRules
from prefill_worker.commit_client import CommitClient
from prefill_worker.prefill_phase import PrefillPhase
from prefill_worker.prefill_service import PrefillService
from serving_core.clock import MonotonicClock
from serving_core.ids import Incarnation, ReservationId, RouterId, WorkerId
from serving_core.rpc.channel import make_server, open_channel
from serving_core.rpc.v1 import decode_pb2_grpc, prefill_pb2_grpc
from serving_core.token_event import SequenceEvent
from tests.pages import assert_no_leaks
from tests.phases import LAYOUT, MAX_MODEL_LEN, NUM_TOKENS, FakeCache, FakeRunner, RecordingSink

WAIT_S = 10.0


class AwaitableSink(RecordingSink):
    """Events from an engine thread, to be waited for on the test's event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._has_news = asyncio.Event()

    def emit(self, router_id: RouterId, events: Sequence[SequenceEvent]) -> None:
        super().emit(router_id, events)
        self._loop.call_soon_threadsafe(self._has_news.set)

    async def wait_until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_true():
                await self._has_news.wait()
                self._has_news.clear()


class WorkerServer:
    """One worker with one pool and the phases asked for; ``async with`` runs it."""

    def __init__(
        self,
        *,
        is_prefill: bool = False,
        is_decode: bool = False,
        num_pages: int = 16,
        lease_s: float = 60.0,
        max_wait_s: float = 30.0,
    ) -> None:
        self._is_prefill = is_prefill
        self._is_decode = is_decode
        self._lease_s = lease_s
        self._max_wait_s = max_wait_s
        self._clock = MonotonicClock()
        self._num_ids = 0
        self.pool = PagePool(num_pages, LAYOUT.page_size, self._clock)
        self.cache = FakeCache(num_pages)
        self.runner = FakeRunner(self.cache)
        self.sink = AwaitableSink()
        self.crashes: list[BaseException] = []

    async def __aenter__(self) -> WorkerServer:
        self._server = make_server()
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        rules = TokenRules(eos_token_ids=frozenset(), num_tokens=NUM_TOKENS, max_model_len=MAX_MODEL_LEN)
        self.decode_phase = DecodePhase(
            worker_id=WorkerId("decode-0"),
            incarnation=Incarnation("d0"),
            address=self.address,
            layout=LAYOUT,
            pool=self.pool,
            cache=self.cache,
            rules=rules,
            sink=self.sink,
            clock=self._clock,
            lease_s=self._lease_s,
            max_num_seqs=8,
            new_reservation_id=self._new_id,
        )
        self.prefill_phase = PrefillPhase(
            worker_id=WorkerId("prefill-0"),
            layout=LAYOUT,
            pool=self.pool,
            rules=rules,
            sink=self.sink,
            clock=self._clock,
            lease_s=self._lease_s,
            max_num_batched_tokens=8,
            max_num_seqs=8,
            local_decode=self.decode_phase if self._is_decode else None,
        )
        phases: list[Phase] = []
        if self._is_prefill:
            phases.append(self.prefill_phase)
        if self._is_decode:
            phases.append(self.decode_phase)
        self.loop = StepLoop(runner=self.runner, phases=phases, clock=self._clock, on_crash=self.crashes.append)
        self.transport = GrpcPageTransport(stall_timeout_s=2.0)
        self.prefill_service = PrefillService(
            phase=self.prefill_phase,
            engine=self.loop,
            layout=LAYOUT,
            source=self.cache,
            transport=self.transport,
            clock=self._clock,
            commits=CommitClient(timeout_s=2.0),
            max_wait_s=self._max_wait_s,
        )
        if self._is_decode:
            DecodeService(phase=self.decode_phase, engine=self.loop, max_wait_s=self._max_wait_s).add_to_server(self._server)
            GrpcPageService(DecodePageSink(phase=self.decode_phase, engine=self.loop)).add_to_server(self._server)
        if self._is_prefill:
            self.prefill_service.add_to_server(self._server)
        self.channel = open_channel(self.address)
        self.loop.start()
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.prefill_service.close()
        await self.transport.close()
        await self.channel.close()
        await self.stop_server()
        assert self.loop.stop(WAIT_S)
        assert self.crashes == []
        if error is None:
            assert_no_leaks(self.pool)

    async def stop_server(self) -> None:
        """Stop answering, as a worker that has died. Idempotent."""
        await self._server.stop(None)

    @property
    def prefill(self) -> prefill_pb2_grpc.PrefillAsyncStub:
        return prefill_pb2_grpc.PrefillStub(self.channel)

    @property
    def decode(self) -> decode_pb2_grpc.DecodeAsyncStub:
        return decode_pb2_grpc.DecodeStub(self.channel)

    async def num_free_pages(self) -> int:
        """After everything that was queued for the engine thread."""
        return await run_between_steps(self.loop, lambda: self.pool.num_available)

    async def wait_until_free(self, num_pages: int) -> None:
        """Nothing tells when a page comes free, so this asks again and again."""
        async with asyncio.timeout(WAIT_S):
            while await self.num_free_pages() != num_pages:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _new_id(self) -> ReservationId:
        self._num_ids += 1
        return ReservationId(f"{self._num_ids:032x}")
