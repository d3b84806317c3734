"""One worker's composition: model, pages, phases, step loop, gRPC server, links to the routers. Holds no logic of its own, and
knows neither Ray nor what process it runs in."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from decode_worker.decode_phase import DecodePhase
from decode_worker.decode_service import DecodeService
from decode_worker.page_sink import DecodePageSink
from llm_engine.device import CPU
from llm_engine.engine_calls import run_between_steps
from llm_engine.engine_thread import configure_engine_thread
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel
from llm_engine.memory_budget import num_pages_for_budget
from llm_engine.model_runner import ModelRunner
from llm_engine.page_pool import PagePool
from llm_engine.phase import Phase
from llm_engine.step_loop import StepLoop
from llm_engine.token_rules import TokenRules
from prefill_worker.commit_client import CommitClient
from prefill_worker.handoff_counters import HandoffCounters
from prefill_worker.prefill_phase import PrefillPhase
from prefill_worker.prefill_service import PrefillService
from serving_core.clock import Clock, MonotonicClock
from serving_core.errors import ConfigError
from serving_core.ids import Incarnation, ReservationId, SequenceKey
from serving_core.page_state import PagesSnapshot
from serving_core.rpc.channel import make_server
from serving_core.rpc.v1 import worker_pb2_grpc
from serving_core.worker_status import PhaseName, WorkerHello, WorkerStatus
from twinpool.page_paths import PagePlace, PageServices, make_transport
from twinpool.router_link import RouterLinks
from twinpool.worker_metrics import WorkerCounts, make_families
from twinpool.worker_service import WorkerService
from twinpool.worker_spec import WorkerSpec

SERVER_GRACE_S = 0.5
ENGINE_STOP_TIMEOUT_S = 3.0


class Worker:
    """A running worker; see ``running``. Everything here happens on one asyncio loop, phases and pool only between steps."""

    def __init__(
        self, spec: WorkerSpec, loaded: LoadedModel, *, on_crash: Callable[[BaseException], None], clock: Clock
    ) -> None:
        engine = spec.engine
        page_size = engine.page_size or loaded.default_page_size
        layout = loaded.config.page_layout(page_size=page_size, dtype=engine.page_dtype)
        max_model_len = engine.max_model_len or loaded.config.max_model_len
        num_pages = num_pages_for_budget(layout, engine.kv_cache_memory_bytes, max_model_len)
        self._server = make_server(token=spec.cluster_token)
        address = _listen(self._server, spec.host)
        self.hello = WorkerHello(
            worker_id=spec.worker_id,
            incarnation=Incarnation(uuid.uuid4().hex),
            phases=spec.phases,
            address=address,
            node=socket.gethostname(),
            pids=(os.getpid(),),
            tensor_parallel_size=1,
            model_name=spec.model_name,
            model_print=loaded.model_print,
            prefill_arithmetic=_arithmetic(spec, loaded, PhaseName.PREFILL),
            decode_arithmetic=_arithmetic(spec, loaded, PhaseName.DECODE),
            layout=layout,
            num_pages=num_pages,
            max_model_len=max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_prefill_tokens_per_step=engine.max_num_batched_tokens,
        )
        self._clock = clock
        self._lease_s = engine.lease_s
        self._has_prefix_cache = engine.has_prefix_cache
        self._rules = TokenRules(
            eos_token_ids=loaded.eos_token_ids, num_tokens=loaded.config.num_tokens, max_model_len=max_model_len
        )
        self._cache = KVCache(layout, num_pages, device=loaded.device, has_spare_page=loaded.device != CPU)
        self._pool = PagePool(num_pages, page_size, clock)
        self._token = spec.cluster_token
        self._links = RouterLinks(
            addresses=spec.router_addresses, read_status=self.read_status, renew=self._renew, token=self._token
        )
        place = PagePlace(
            way=spec.transfer, host=spec.host, device=str(loaded.device), is_fabric_trusted=spec.is_fabric_trusted
        )
        self._transport = make_transport(place, clock, self._token)

        self._decode = self._make_decode_phase() if PhaseName.DECODE in spec.phases else None
        self._prefill = self._make_prefill_phase() if PhaseName.PREFILL in spec.phases else None
        self._phases: list[Phase] = [phase for phase in (self._decode, self._prefill) if phase is not None]
        self._loop = StepLoop(
            runner=ModelRunner(
                loaded,
                self._cache,
                max_recorded_rows=0 if engine.is_eager(PhaseName.DECODE) else engine.max_num_seqs,
                has_async_scheduling=engine.has_async_scheduling,
            ),
            phases=self._phases,
            clock=clock,
            on_crash=on_crash,
            setup_thread=lambda: configure_engine_thread(engine.num_threads, engine.cpu_cores, engine.niceness),
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(self.read_pages), self._server)
        self._page_services = self._serve_decode(self._decode, place) if self._decode is not None else None
        self._prefill_service = self._serve_prefill(self._prefill) if self._prefill is not None else None

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        spec: WorkerSpec,
        loaded: LoadedModel,
        *,
        on_crash: Callable[[BaseException], None],
    ) -> AsyncIterator[Worker]:
        """A worker that serves until the context is left, then holds nothing any more.

        ``on_crash`` is told, on the engine thread, what made the engine useless. Raises ``ConfigError``.
        """
        worker = cls(spec, loaded, on_crash=on_crash, clock=MonotonicClock())
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, worker._loop.stop, ENGINE_STOP_TIMEOUT_S)
            worker._loop.start()
            stack.push_async_callback(worker._transport.close)
            if worker._prefill_service is not None:
                stack.push_async_callback(worker._prefill_service.close)
            stack.push_async_callback(worker._server.stop, SERVER_GRACE_S)
            if worker._page_services is not None:
                stack.push_async_callback(worker._page_services.close)
                worker._page_services.start(worker.hello.address, worker.hello.incarnation)
            await worker._server.start()
            linking = asyncio.create_task(worker._links.run(worker.hello))
            linking.add_done_callback(lambda task: _crash_on_failure(task, on_crash))
            stack.push_async_callback(_cancel, linking)
            yield worker

    async def read_status(self) -> WorkerStatus:
        """The worker's load, taken between two steps."""
        return await run_between_steps(self._loop, self._take_status)

    async def read_pages(self, is_summary: bool) -> PagesSnapshot:
        """The page pool, taken between two steps."""
        return await run_between_steps(self._loop, lambda: self._pool.snapshot(is_summary=is_summary))

    def _make_decode_phase(self) -> DecodePhase:
        return DecodePhase(
            worker_id=self.hello.worker_id,
            incarnation=self.hello.incarnation,
            address=self.hello.address,
            layout=self.hello.layout,
            pool=self._pool,
            cache=self._cache,
            rules=self._rules,
            sink=self._links,
            clock=self._clock,
            lease_s=self._lease_s,
            max_num_seqs=self.hello.max_num_seqs,
            new_reservation_id=lambda: ReservationId(uuid.uuid4().hex),
            has_prefix_cache=self._has_prefix_cache,
        )

    def _make_prefill_phase(self) -> PrefillPhase:
        return PrefillPhase(
            worker_id=self.hello.worker_id,
            layout=self.hello.layout,
            pool=self._pool,
            rules=self._rules,
            sink=self._links,
            clock=self._clock,
            lease_s=self._lease_s,
            max_num_batched_tokens=self.hello.max_prefill_tokens_per_step,
            max_num_seqs=self.hello.max_num_seqs,
            local_decode=self._decode,
            has_prefix_cache=self._has_prefix_cache,
        )

    def _serve_decode(self, phase: DecodePhase, place: PagePlace) -> PageServices:
        DecodeService(phase=phase, engine=self._loop).add_to_server(self._server)
        sink = DecodePageSink(phase=phase, engine=self._loop)
        return PageServices(sink, place=place, server=self._server, token=self._token)

    def _serve_prefill(self, phase: PrefillPhase) -> PrefillService:
        service = PrefillService(
            phase=phase,
            engine=self._loop,
            layout=self.hello.layout,
            source=self._cache,
            transport=self._transport,
            clock=self._clock,
            commits=CommitClient(token=self._token),
        )
        service.add_to_server(self._server)
        return service

    def _take_status(self) -> WorkerStatus:
        statuses = [phase.status() for phase in self._phases]
        num_running = sum(status.num_running for status in statuses)
        num_waiting = sum(status.num_waiting for status in statuses)
        if num_running == num_waiting == 0:
            self._pool.check()  # it walks every page, which only an idle worker has time for
            assert self._pool.num_available == self._pool.num_pages, "a page is held though no phase holds a sequence"
        counts = WorkerCounts(
            statuses=statuses,
            counters=[phase.counters for phase in (self._decode, self._prefill) if phase is not None],
            pages=self._pool.counts(),
            handoffs=self._prefill_service.counters if self._prefill_service is not None else HandoffCounters(),
            refused_writes=self._page_services.num_refused_writes if self._page_services is not None else {},
            page_streams=self._transport.num_streams,
        )
        return WorkerStatus(
            num_running=num_running,
            num_waiting=num_waiting,
            is_draining=False,
            metrics=make_families(counts),
        )

    def _renew(self, keys: frozenset[SequenceKey]) -> None:
        def renew() -> None:
            for phase in self._phases:
                phase.renew(keys)

        self._loop.call(renew)


def _arithmetic(spec: WorkerSpec, loaded: LoadedModel, phase: PhaseName) -> str:
    """Keys and values are attended to as the cache holds them, so its type belongs to it."""
    if phase not in spec.phases:
        return ""
    return f"{loaded.phases[phase].arithmetic}, {spec.engine.page_dtype.value} KV cache"


def _listen(server: grpc.aio.Server, host: str) -> str:
    try:
        return f"{host}:{server.add_insecure_port(f'{host}:0')}"
    except RuntimeError as error:
        raise ConfigError(f"a worker cannot listen on {host}, which is to be an address of its machine: {error}") from error


def _crash_on_failure(task: asyncio.Task[None], on_crash: Callable[[BaseException], None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        on_crash(error)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
