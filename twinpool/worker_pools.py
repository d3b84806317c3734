"""The workers of one server as Ray actors: starts them, watches them, stops them. Which worker gets which request is the
router's business; Ray restarts what dies."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from serving_core.errors import TwinpoolError
from serving_core.ids import WorkerId
from twinpool.cluster import Cluster, WorkerPlaces
from twinpool.worker_actor import MAX_CONCURRENCY, WorkerActor
from twinpool.worker_spec import WorkerSpec
from twinpool.worker_thread import LoadProgress

STOP_TIMEOUT_S = 6.0
RESTART_BACK_OFF_S = 1.0
MAX_FIRST_DEATHS = 3
"""A worker that has never served is given up after so many; one that has is started again for as long as the server lives."""
MAX_CAUSE_LENGTH = 300

_log = logging.getLogger(__name__)


class StartDisplay(Protocol):
    """Shows how the workers' starts are going."""

    def show_progress(self, worker_id: WorkerId, progress: LoadProgress) -> None:
        """Part of the weights is loaded."""

    def show_ready(self, worker_id: WorkerId, seconds: float) -> None:
        """The worker serves, ``seconds`` after it was asked for."""


class WorkerPools:
    """Life: 1. ``start``; 2. ``wait_ready``; 3. ``watch`` for as long as the server runs; 4. ``stop``, after any of these.

    ``on_restart`` is told of a worker whose process is gone and that Ray starts again. The news takes Ray seconds, so the new
    process may serve already. ``on_failure`` is told of one whose new process cannot serve.
    """

    def __init__(
        self,
        cluster: Cluster,
        display: StartDisplay,
        *,
        on_restart: Callable[[WorkerId], None],
        on_failure: Callable[[WorkerId], None],
    ) -> None:
        self._cluster = cluster
        self._display = display
        self._on_restart = on_restart
        self._on_failure = on_failure
        self._actors: dict[WorkerId, Any] = {}
        self._started_at = time.monotonic()

    async def start(self, specs: Sequence[WorkerSpec], places: WorkerPlaces) -> None:
        """Ask Ray for one actor a worker; returns before any of them has loaded."""
        self._started_at = time.monotonic()
        await self._cluster.call(lambda: self._create_actors(specs, places))

    async def wait_ready(self) -> None:
        """Until every worker serves. Raises ``TwinpoolError`` when one cannot start, or dies again and again."""
        await _all(
            self._wait_ready(worker_id, actor, self._started_at, max_deaths=MAX_FIRST_DEATHS)
            for worker_id, actor in self._actors.items()
        )

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
            num_gpus=places.num_gpus,
            resources=dict(places.resources),
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_concurrency=MAX_CONCURRENCY,
        )
        for spec in specs:
            # Ray hides no GPU from those that asked for none
            self._actors[spec.worker_id] = actor_class.remote(dataclasses.replace(spec, gpu_share=places.num_gpus))

    def _stop_actors(self) -> None:
        actors, self._actors = list(self._actors.values()), {}
        if not actors:
            return
        import ray

        stopping = [actor.stop.remote() for actor in actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)

    async def _wait_ready(self, worker_id: WorkerId, actor: Any, since: float, *, max_deaths: int | None = None) -> None:
        import ray

        num_deaths = 0
        while True:
            is_up = False
            try:
                async for reference in actor.watch_start.options(num_returns="streaming").remote():
                    progress = await reference
                    is_up = True
                    self._display.show_progress(worker_id, progress)
            except ray.exceptions.RayActorError as error:
                # a process that Ray is still starting is unavailable too, which is no death
                if is_up or not isinstance(error, ray.exceptions.ActorUnavailableError):
                    num_deaths += 1
                    if num_deaths == max_deaths:
                        raise TwinpoolError(_describe_deaths(worker_id, num_deaths, error)) from None
                    self._note_death(worker_id, "died while it started")
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
                self._note_death(worker_id, "died")
            try:
                await self._wait_ready(worker_id, actor, time.monotonic())
            except TwinpoolError as error:
                _log.error("%s cannot start again: %s", worker_id, error)
                self._on_failure(worker_id)
                await asyncio.sleep(RESTART_BACK_OFF_S)
                await self._cluster.call(lambda: ray.kill(actor, no_restart=False))

    def _note_death(self, worker_id: WorkerId, what: str) -> None:
        _log.warning("%s %s; it is started again", worker_id, what)
        self._on_restart(worker_id)


def _describe_deaths(worker_id: WorkerId, num_deaths: int, last: Exception) -> str:
    return (
        f"{worker_id} died {num_deaths} times while it started and is given up; if it said nothing, it was killed from "
        f"outside, as happens when memory runs out. Ray says: {textwrap.shorten(str(last), MAX_CAUSE_LENGTH)}"
    )


async def _all(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run the parts beside one another until all have ended or one fails, whose exception is raised as it is."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
