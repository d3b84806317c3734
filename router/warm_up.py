"""Warm prompts: each worker gets them before anybody else's, so that requests which begin so find them in its prefix cache.

1. A process registers *cold*: it counts as starting, and no request is placed on it.
2. Once there is a worker for either phase, the warm prompts are sent through it one by one, as requests of the router's own.
   Prefill computes them, and decode gets their pages by the hand-off.
3. It is *warm* for as long as it lives, and serves. So it does when a warm prompt got no room in time, or failed: to be slow at
   first is better than not to be there.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence

from router.background_tasks import BackgroundTasks
from router.registered_worker import RegisteredWorker
from router.request_life import DecisionCounter, RequestLife
from router.retry_budget import RetryPolicy
from router.waiting_line import WaitingLine
from router.warm_prompts import NUM_ANSWER_TOKENS
from router.worker_directory import WorkerDirectory
from serving_core.clock import Clock
from serving_core.errors import TwinpoolError
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey
from serving_core.sampling_params import SamplingParams
from serving_core.worker_status import PhaseName

MAX_WAIT_S = 30.0
"""How long a warm prompt waits for room beside the requests on the workers that are warm."""

_SAMPLING = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, temperature=0.0, ignore_eos=True)

_log = logging.getLogger(__name__)


class WarmUp:
    """Sends ``prompts`` to the cold workers of ``directory``. Runs on the router's loop. Must be made before whoever places
    requests: of those who wait for a change, the first to subscribe takes the room."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        directory: WorkerDirectory,
        tasks: BackgroundTasks,
        decisions: DecisionCounter,
        draw_jitter: Callable[[], float],
        clock: Clock,
        max_wait_s: float = MAX_WAIT_S,
        make_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._prompts = prompts
        self._directory = directory
        self._tasks = tasks
        self._decisions = decisions
        self._draw_jitter = draw_jitter
        self._clock = clock
        self._make_id = make_id
        # A line of their own: in that of the requests they would stand behind those that wait for this worker.
        self._line = WaitingLine(clock=clock, missing_phases=lambda: (), worker_wait_s=max_wait_s, max_wait_s=max_wait_s)
        self._under_way: dict[RegisteredWorker, asyncio.Task[None]] = {}
        self._is_closed = False
        directory.subscribe(self._line.poke)
        directory.subscribe(self._look)

    def close(self) -> None:
        """Give up what is under way; workers serve as they are from now on. Idempotent."""
        self._is_closed = True
        for task in self._under_way.values():
            task.cancel()
        self._look()

    def _look(self) -> None:
        for worker in self._directory.connected():
            if worker.is_warm or worker in self._under_way:
                continue
            if self._is_closed:
                worker.become_warm()
            elif self._can_begin(worker):
                self._begin(worker)

    def _can_begin(self, worker: RegisteredWorker) -> bool:
        ready = {phase for each in self._pair_of(worker) if each.is_ready for phase in each.hello.phases}
        return worker.is_ready and ready == set(PhaseName)

    def _begin(self, worker: RegisteredWorker) -> None:
        task = self._under_way[worker] = self._tasks.spawn(self._warm(worker))
        task.add_done_callback(lambda _: self._under_way.pop(worker))
        worker.gone.add_done_callback(lambda _: task.cancel())

    async def _warm(self, worker: RegisteredWorker) -> None:
        worker_id, began_at = worker.hello.worker_id, self._clock.now()
        try:
            for prompt in self._prompts:
                await self._send(prompt, worker)
            num_tokens = sum(map(len, self._prompts))
            _log.info(
                "%s has the %d tokens of the warm prompts after %.1f s", worker_id, num_tokens, self._clock.now() - began_at
            )
        except TwinpoolError as error:
            _log.warning("%s serves without all of the warm prompts: %s", worker_id, error)
        finally:
            if worker.lost_at is None:
                worker.become_warm()

    async def _send(self, prompt: tuple[int, ...], worker: RegisteredWorker) -> None:
        life = RequestLife(
            GenerateRequest(key=SequenceKey(RequestId(f"warm-{self._make_id()}")), prompt_token_ids=prompt, sampling=_SAMPLING),
            workers=lambda: self._pair_of(worker),
            line=self._line,
            tasks=self._tasks,
            decisions=self._decisions,
            retry_policy=RetryPolicy(),
            draw_jitter=self._draw_jitter,
            on_end=lambda _: None,
        )
        try:
            await life.open()
            async for _ in life:
                pass
        finally:
            life.close()

    def _pair_of(self, worker: RegisteredWorker) -> list[RegisteredWorker]:
        """The worker, and those that only have the phase it lacks. A decode worker is sent what a warm prefill worker has: at a
        start it is not computed twice."""
        lacking = frozenset(PhaseName) - worker.hello.phases
        others = (other for other in self._directory.connected() if other.hello.phases == lacking)
        return [worker, *(other for other in others if other.is_warm or PhaseName.DECODE in lacking)]
