"""A router's pair side on a real loop and real sockets, without HTTP, model or workers of ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from router.background_tasks import BackgroundTasks
from router.generation import Generation
from router.link_server import LinkServer
from router.metrics import RouterMetrics
from router.pair_generator import PairGenerator
from router.retry_budget import RetryPolicy
from router.waiting_line import WaitingLine
from router.worker_client import WorkerClient
from router.worker_directory import WorkerDirectory
from serving_core.clock import MonotonicClock
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RouterId
from serving_core.rpc.channel import make_server
from serving_core.rpc.v1.router_link_pb2_grpc import add_RouterLinkServicer_to_server
from serving_core.sampling_params import SamplingParams
from serving_core.worker_status import PhaseName
from tests.unit.router.fake_worker import FakeWorker, make_key

LEASE_S = 0.3
QUICK_RETRIES = RetryPolicy(max_attempts=3, first_pause_s=0.01, max_pause_s=0.02)


@dataclass(kw_only=True)
class Pair:
    """What a test of the pair side talks to."""

    address: str
    directory: WorkerDirectory
    line: WaitingLine
    generator: PairGenerator
    tasks: BackgroundTasks
    metrics: RouterMetrics

    def assert_no_leaks(self) -> None:
        """No sequence, no leg, nobody in line, no task."""
        assert self.generator.num_live == 0
        assert len(self.line) == 0
        assert len(self.tasks) == 0
        assert [worker.num_legs for worker in self.directory.registered()] == [0 for _ in self.directory.registered()]


@contextlib.asynccontextmanager
async def open_pair(
    *,
    worker_wait_s: float = 5.0,
    max_waiting: int = 256,
    lease_s: float = LEASE_S,
    reserve_timeout_s: float = 5.0,
    release_timeout_s: float = 0.5,
    max_hold_s: float = 30.0,
    max_silence_s: float = 30.0,
    retry_policy: RetryPolicy = QUICK_RETRIES,
) -> AsyncIterator[Pair]:
    """Serves a link; at the end everything is stopped and nothing may be left."""
    clock = MonotonicClock()
    tasks = BackgroundTasks()
    router_id = RouterId("router-0")
    directory = WorkerDirectory(
        clock=clock,
        dead_after_s=3 * lease_s,
        connect=lambda hello: WorkerClient(
            hello, router_id=router_id, reserve_timeout_s=reserve_timeout_s, release_timeout_s=release_timeout_s
        ),
        tasks=tasks,
        max_hold_s=max_hold_s,
        max_silence_s=max_silence_s,
    )
    line = WaitingLine(
        clock=clock, missing_phases=directory.missing_phases, worker_wait_s=worker_wait_s, max_waiting=max_waiting
    )
    metrics = RouterMetrics(model_name="tiny")
    generator = PairGenerator(
        directory=directory,
        line=line,
        tasks=tasks,
        decisions=metrics,
        draw_jitter=lambda: 1.0,
        retry_policy=retry_policy,
    )
    link = LinkServer(directory=directory, router_id=router_id, model_name="tiny", model_print=None, lease_s=lease_s)
    server = make_server()
    add_RouterLinkServicer_to_server(link, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    pair = Pair(address=address, directory=directory, line=line, generator=generator, tasks=tasks, metrics=metrics)
    try:
        yield pair
    finally:
        async with asyncio.timeout(10):
            await generator.close()
            await server.stop(None)
            directory.close()
            await tasks.join()
        pair.assert_no_leaks()


def make_request(request_id: str = "r", *, num_prompt_tokens: int = 6, max_tokens: int = 5) -> GenerateRequest:
    """11 tokens, so 3 pages of 4, unless told otherwise."""
    return GenerateRequest(
        key=make_key(request_id),
        prompt_token_ids=tuple(range(1, num_prompt_tokens + 1)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )


class Pools:
    """Makes workers, joins them, and ends them after the test."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._workers: list[FakeWorker] = []

    async def add(self, worker_id: str, *phases: PhaseName, **hello_fields: object) -> FakeWorker:
        worker = await FakeWorker(worker_id, *phases, **hello_fields).join(self._pair.address)
        self._workers.append(worker)
        async with asyncio.timeout(5):
            await self._pair.directory.wait_until(lambda: self._is_ready(worker))
        return worker

    async def close(self) -> None:
        for worker in self._workers:
            await worker.die()

    def _is_ready(self, worker: FakeWorker) -> bool:
        return any(known.is_ready for known in self._pair.directory.registered() if known.hello.worker_id == worker.worker_id)


async def settle(pair: Pair) -> None:
    """Every life has ended and every release has been answered."""
    async with asyncio.timeout(5):
        await pair.generator.wait_idle()
    pair.assert_no_leaks()


async def collect(generation: Generation) -> list[int]:
    """Every token id, within five seconds."""
    async with asyncio.timeout(5):
        return [event.token_id async for event in generation]
