"""The server's own process: the router in its main asyncio loop, Ray and the workers beside it. Owns the order in which they
start, drain and stop, and nothing else.

Life: 1. link and HTTP are served, while Ray starts; 2. the workers start, dial the link, and requests that waited are taken;
3. serving; 4. a first signal, or the loss of Ray: no new request, those under way may end, for ``DRAIN_TIMEOUT_S`` at most; a
second: at once; 5. HTTP, workers, Ray and their files are gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from llm_engine.model_config import ModelConfig
from router.chat_template import ChatTemplate
from router.router import Router
from router.tokenizer import Tokenizer
from serving_core.worker_status import Role
from twinpool.cluster import LOCAL, Cluster, WorkerPlaces
from twinpool.core_plan import CorePlan
from twinpool.fabric import is_fabric_trusted
from twinpool.http_server import HttpServer, url_of
from twinpool.joined_cluster import JoinedCluster
from twinpool.local_cluster import LocalCluster
from twinpool.process_cores import confine_process_tree
from twinpool.serve_config import ServeConfig
from twinpool.server_token import server_token
from twinpool.start_display import BarDisplay, LineDisplay
from twinpool.stop_signals import StopSignals
from twinpool.worker_pools import WorkerPools
from twinpool.worker_specs import make_worker_specs, plan_node_cores

DRAIN_TIMEOUT_S = 30.0
HTTP_END_TIMEOUT_S = 2.0
RAY_END_TIMEOUT_S = 30.0
"""Ray may still be starting, which takes it long on a busy machine."""

_log = logging.getLogger(__name__)


class Server:
    """One server, from its start to its end. ``warm_prompts`` are token ids: see ``Router``. Constructing it raises
    ``ConfigError`` for an environment with an unfit token."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        model: ModelConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        core_plan: CorePlan,
        listener: socket.socket,
        warm_prompts: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._warm_prompts = warm_prompts
        self._core_plan = core_plan
        self._listener = listener
        self._cluster_token = server_token(os.environ)
        is_local = config.address == LOCAL
        self._cluster: Cluster = LocalCluster(num_gpus=config.num_gpus) if is_local else JoinedCluster(config.address)

    async def run(self) -> None:
        """Serve until a signal. Raises ``TwinpoolError`` when a worker cannot start, and whatever else ended the server;
        nothing is left running either way. Where Ray could not be waited for, the process ends with ``Cluster.abandon``'s
        status, whatever it ended for."""
        signals = StopSignals()
        roles = {
            spec.worker_id: Role.of(spec.phases) for spec in make_worker_specs(self._config, self._model, self._core_plan, ())
        }
        router = self._make_router()
        for worker_id, role in roles.items():
            router.expect(worker_id, role)
        http = HttpServer(router.app, self._listener)
        pools = WorkerPools(
            self._cluster,
            BarDisplay() if sys.stderr.isatty() else LineDisplay(),
            on_restart=lambda worker_id: router.expect(worker_id, roles[worker_id]),
            on_failure=router.mark_dead,
        )
        starting_cluster = asyncio.create_task(self._cluster.start(num_workers=len(roles)))
        serving_http = asyncio.create_task(http.run())
        working = asyncio.create_task(self._run_workers(router, pools, starting_cluster))
        asked_to_finish = asyncio.create_task(signals.finish.wait())
        losing_ray = asyncio.create_task(self._cluster.wait_lost())
        async with AsyncExitStack() as stack:  # from its end to its beginning, each step whether or not another one fails
            stack.push_async_callback(_raise_failure, serving_http)
            stack.push_async_callback(_raise_failure, working)
            stack.push_async_callback(self._leave_ray, pools, losing_ray, signals)
            stack.push_async_callback(router.stop)
            stack.push_async_callback(_end_http, http, serving_http, signals)
            stack.callback(working.cancel)
            stack.callback(asked_to_finish.cancel)
            print(f"listening on {url_of(self._listener)}", flush=True)
            await asyncio.wait({serving_http, working, asked_to_finish, losing_ray}, return_when=asyncio.FIRST_COMPLETED)
            if losing_ray.done():
                working.cancel()
                signals.finish.set()
                _log.error("%s, so that no worker can be started any more: the server ends", losing_ray.result())
            if signals.finish.is_set():
                await _drain(router, signals)

    def _make_router(self) -> Router:
        return Router(
            model_name=self._config.served_model_name,
            tokenizer=self._tokenizer,
            chat_template=self._chat_template,
            max_model_len=self._config.max_model_len(self._model.max_model_len),
            lease_s=self._config.lease_s,
            worker_wait_s=self._config.worker_wait_s,
            warm_prompts=self._warm_prompts,
            api_key=self._config.api_key,
            admin_key=self._config.admin_key,
            cluster_token=self._cluster_token,
        )

    async def _run_workers(self, router: Router, pools: WorkerPools, starting_cluster: asyncio.Task[WorkerPlaces]) -> None:
        """Start the workers, then watch them until cancelled."""
        began_at = time.monotonic()
        places = await starting_cluster
        is_trusted = is_fabric_trusted(self._config, places)
        if places.num_cores is not None:
            self._core_plan = plan_node_cores(self._config, places.num_cores)
        link_address = await router.start_link(places.host)
        specs = [
            dataclasses.replace(spec, is_fabric_trusted=is_trusted, cluster_token=self._cluster_token)
            for spec in make_worker_specs(self._config, self._model, self._core_plan, (link_address,))
        ]
        # what runs by now, and whatever it starts, leaves decode's cores alone; an engine thread moves to them by itself
        confine_process_tree(self._core_plan.shared)
        await pools.start(specs, places)
        await pools.wait_ready()
        await router.wait_ready()
        gc.freeze()  # what is there stays: looking through it again and again would hold up tokens
        _log.info("ready after %.1f s: %s", time.monotonic() - began_at, ", ".join(spec.worker_id for spec in specs))
        await pools.watch()

    async def _leave_ray(self, pools: WorkerPools, losing_ray: asyncio.Task[str], signals: StopSignals) -> None:
        """In order, unless a part of Ray is gone, a second signal comes, or Ray does not get on with it."""
        if losing_ray.done() or signals.stop_now.is_set():
            self._cluster.abandon()
            return
        leaving = asyncio.create_task(self._leave_ray_in_order(pools))
        hurrying = asyncio.create_task(signals.stop_now.wait())
        await asyncio.wait({leaving, losing_ray, hurrying}, timeout=RAY_END_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        losing_ray.cancel()
        hurrying.cancel()
        if leaving.done():
            leaving.result()
        else:
            leaving.cancel()
            self._cluster.abandon()

    async def _leave_ray_in_order(self, pools: WorkerPools) -> None:
        try:
            await pools.stop()
        finally:
            await self._cluster.stop()


async def _drain(router: Router, signals: StopSignals) -> None:
    router.begin_drain()
    _log.info("finishing what is under way, for %.0f s at most; once more stops at once", DRAIN_TIMEOUT_S)
    idle, stop_now = asyncio.create_task(router.wait_idle()), asyncio.create_task(signals.stop_now.wait())
    await asyncio.wait({idle, stop_now}, timeout=DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    stop_now.cancel()


async def _end_http(http: HttpServer, serving: asyncio.Task[None], signals: StopSignals) -> None:
    if not signals.stop_now.is_set():
        http.finish()
        await asyncio.wait({serving}, timeout=HTTP_END_TIMEOUT_S)
    http.cut()


async def _raise_failure(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
