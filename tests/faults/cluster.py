"""A router and workers as processes, each on a node of its own, with the tiny model, and what may happen to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from serving_core.engine_config import EngineConfig, Quantization
from serving_core.ids import WorkerId
from serving_core.kv_page_layout import KVDType
from serving_core.metric_names import NUM_REQUESTS_WAITING
from serving_core.rpc.cluster_token import ClusterToken
from serving_core.worker_status import PhaseName
from tests.e2e.server_process import MODEL, REST
from tests.faults.network import Network
from tests.faults.node_process import LINK_PORT, Pace, RouterSpec, run_router, run_worker
from twinpool.worker_spec import WorkerSpec

ROUTER = "router"
PAGE_SIZE = 16
CHUNK = 16
START_TIMEOUT_S = 60.0
STEP_S = {PhaseName.PREFILL: 0.03, PhaseName.DECODE: 0.02}
POLL_S = 0.005
_PHASES = {"prefill": PhaseName.PREFILL, "decode": PhaseName.DECODE}


class FaultyCluster:
    """The workers ``names``, such as prefill-0 and decode-0; ``with`` runs it. Its network's faults are the test's."""

    def __init__(self, network: Network, model: Path, folder: Path, *, names: tuple[str, ...], lease_s: float) -> None:
        self.network = network
        self.log = folder / "log"
        self.http_path = folder / "http"
        self._model = model
        self._lease_s = lease_s
        self._token = ClusterToken.draw()
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.faults.node_process"])
        self._processes: dict[str, ForkServerProcess] = {}
        self.paces = {
            name: Pace(self._context.Value("d", STEP_S[_phase_of(name)]), self._context.Value("i", 0)) for name in names
        }

    def __enter__(self) -> FaultyCluster:
        node = self.network.nodes[ROUTER]
        spec = RouterSpec(
            model=self._model, model_name=MODEL, lease_s=self._lease_s, token=self._token, http_path=self.http_path
        )
        self._start(ROUTER, run_router, node, spec, self.log)
        for name in self.paces:
            self.restart(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in tuple(self._processes):
            self.kill(name)
        if error is not None and self.log.exists():
            print(self.log.read_text())

    def kill(self, name: str) -> None:
        """As by kill -9; returns once it is gone."""
        process = self._processes.pop(name)
        process.kill()
        process.join()
        process.close()

    def restart(self, name: str) -> None:
        """Start the worker, as Ray does with one that has ended; see ``wait_ready``."""
        node = self.network.nodes[name]
        spec = WorkerSpec(
            worker_id=WorkerId(name),
            phases=frozenset({_phase_of(name)}),
            model_path=self._model,
            model_name=MODEL,
            engine=EngineConfig(
                dtype=KVDType.FLOAT32,
                page_size=PAGE_SIZE,
                max_model_len=512,
                max_num_seqs=4,
                max_num_batched_tokens=CHUNK,
                kv_cache_memory_bytes=2 << 20,
                num_threads=1,
                prefill_quantization=Quantization.NONE,
                decode_quantization=Quantization.NONE,
                eager_phases=frozenset(PhaseName),
                lease_s=self._lease_s,
            ),
            router_addresses=(f"{self.network.nodes[ROUTER].address}:{LINK_PORT}",),
            host=node.address,
            cluster_token=self._token,
        )
        self._start(name, run_worker, node, spec, self.paces[name], self.log)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Of the router's HTTP API."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.http_path), limits=httpx.Limits(max_connections=None))
        async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
            yield client

    def signal(self, name: str, number: signal.Signals) -> None:
        pid = self._processes[name].pid
        assert pid is not None
        os.kill(pid, number)

    async def falter(self, names: tuple[str, ...], seconds: float, *, stopped_s: float = 0.4, awake_s: float = 0.1) -> None:
        """Let these get on for a fraction of the time only, for ``seconds``: slow, but never silent for as long as a ping."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                for name in names:
                    self.signal(name, signal.SIGSTOP)
                await asyncio.sleep(stopped_s)
                for name in names:
                    self.signal(name, signal.SIGCONT)
                await asyncio.sleep(awake_s)
        finally:
            for name in names:
                self.signal(name, signal.SIGCONT)

    def _start(self, name: str, target: Callable[..., None], *args: object) -> None:
        process = self._context.Process(target=target, args=args, name=name, daemon=True)
        process.start()
        self._processes[name] = process


async def worker_states(client: httpx.AsyncClient) -> Mapping[str, str]:
    """/admin/workers: state by id; empty while the router does not answer yet."""
    with contextlib.suppress(httpx.TransportError):
        answer = await client.get("/admin/workers")
        return {worker["id"]: worker["state"] for worker in answer.json()["workers"]}
    return {}


async def wait_ready(client: httpx.AsyncClient, names: tuple[str, ...], timeout_s: float = START_TIMEOUT_S) -> float:
    """Until these are ready. Returns the seconds it took."""

    async def are_ready() -> bool:
        states = await worker_states(client)
        return all(states.get(name) == "ready" for name in names)

    return await until(are_ready, timeout_s, f"{names} to be ready")


async def is_at_rest(client: httpx.AsyncClient) -> bool:
    """Whether every page of every worker is free or cached, and their sums are right."""
    workers: list[dict[str, Any]] = json.loads((await client.get("/admin/pages?summary=1")).text)["workers"]
    rest = {state.value for state in REST}
    return all(
        worker["states"] is not None
        and worker["sum_ok"]
        and all(count == 0 for state, count in worker["states"].items() if state not in rest)
        for worker in workers
    )


async def num_in_line(client: httpx.AsyncClient) -> int:
    """Requests that wait in the router for their turn."""
    lines = (await client.get("/metrics")).text.splitlines()
    own = next(line for line in lines if line.startswith(NUM_REQUESTS_WAITING) and f'role="{ROUTER}"' in line)
    return int(float(own.rsplit(" ", 1)[1]))


async def until(holds: Callable[[], Any], timeout_s: float, what: str) -> float:
    """Ask again and again, since another process tells nobody when it changes. Returns the seconds it took."""
    began = time.monotonic()
    while True:
        answer = holds()
        if await answer if asyncio.iscoroutine(answer) else answer:
            return time.monotonic() - began
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")
        await asyncio.sleep(POLL_S)


def _phase_of(name: str) -> PhaseName:
    return _PHASES[name.partition("-")[0]]
