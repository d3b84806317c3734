"""The workers of one server as Ray actors: starts them, watches them, stops them. Which worker gets which request is the
router's business; Ray restarts what dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

from serving_core.errors import TwinpoolError
from serving_core.ids import WorkerId
from twinpool.cluster import Cluster, WorkerPlaces
from twinpool.worker_actor import MAX_CONCURRENCY, WorkerActor
from twinpool.worker_spec import WorkerSpec
from twinpool.worker_thread import LoadProgress

STOP_TIMEOUT_S = 6.0
RESTART_BACK_OFF_S = 1.0

_log = logging.getLogger(__name__)


class StartDisplay(Protocol):
    """Shows how the workers' starts are going."""

    def show_progress(self, worker_id: WorkerId, progress: LoadProgress) -> None:
        """Part of the weights is loaded."""

    def show_ready(self, worker_id: WorkerId, seconds: float) -> None:
        """The worker serves, ``seconds`` after it was asked for."""


class WorkerPools:
    """Life: 1. ``start``; 2. ``wait_ready``; 3. ``watch`` for as long as the server runs; 4. ``stop``, after any of these."""

    def __init__(self, cluster: Cluster, display: StartDisplay) -> None:
        self._cluster = cluster
        self._display = display
        self._actors: dict[WorkerId, Any] = {}
        self._started_at = time.monotonic()

    async def start(self, specs: Sequence[WorkerSpec], places: WorkerPlaces) -> None:
        """Ask Ray for one actor a worker; returns before any of them has loaded."""
        self._started_at = time.monotonic()
        await self._cluster.call(lambda: self._create_actors(specs, places))

    async def wait_ready(self) -> None:
        """Until every worker serves. Raises ``TwinpoolError`` when one cannot start."""
        await _all(self._wait_ready(worker_id, actor, self._started_at) for worker_id, actor in self._actors.items())

    async def watch(self) -> None:
        """Report deaths and returns until cancelled."""
        await _all(self._watch(worker_id, actor) for worker_id, actor in self._actors.items())

    async def stop(self) -> None:
        """Stop every worker and end its process, answering or not. Idempotent."""
        await self._cluster.call(self._stop_actors)

    def _create_actors(self, specs: Sequence[WorkerSpec], places: WorkerPlaces) -> None:
        import ray

        actor_class = ray.remote(WorkerActor).options(
            num_cpus=0,
            resources=dict(places.resources),
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_concurrency=MAX_CONCURRENCY,
        )
        for spec in specs:
            self._actors[spec.worker_id] = actor_class.remote(spec)

    def _stop_actors(self) -> None:
        actors, self._actors = list(self._actors.values()), {}
        if not actors:
            return
        import ray

        stopping = [actor.stop.remote() for actor in actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)

    async def _wait_ready(self, worker_id: WorkerId, actor: Any, since: float) -> None:
        import ray

        while True:
            try:
                async for reference in actor.watch_start.options(num_returns="streaming").remote():
                    self._display.show_progress(worker_id, await reference)
            except ray.exceptions.RayActorError:
                _log.warning("%s died while it started; it is started again", worker_id)
                await asyncio.sleep(RESTART_BACK_OFF_S)
                continue
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, TwinpoolError):
                    raise error.cause from None
                raise
            self._display.show_ready(worker_id, time.monotonic() - since)
            return

    async def _watch(self, worker_id: WorkerId, actor: Any) -> None:
        import ray

        while True:
            try:
                await actor.watch_life.remote()
            except ray.exceptions.RayActorError:
                _log.warning("%s died; it is started again", worker_id)
            try:
                await self._wait_ready(worker_id, actor, time.monotonic())
            except TwinpoolError as error:
                _log.error("%s cannot start again: %s", worker_id, error)
                await asyncio.sleep(RESTART_BACK_OFF_S)
                await self._cluster.call(lambda: ray.kill(actor, no_restart=False))


async def _all(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run the parts beside one another until all have ended or one fails, whose exception is raised as it is."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
