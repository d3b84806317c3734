"""The two legs of one sequence: which workers it is on, and their release. Knows neither tokens nor attempts' outcomes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from router.background_tasks import BackgroundTasks
from router.placement import NotNow, Placement, place, place_again
from router.registered_worker import Leg, LegListener, RegisteredWorker
from serving_core.errors import Refused, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.worker_status import PhaseName


class LegPair:
    """Legs are taken together and given up one by one or together; each one that a worker was told of is released there once.

    ``workers`` are the connected ones; ``listener`` hears what happens on a leg. Releases run in ``tasks``.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        workers: Callable[[], Sequence[RegisteredWorker]],
        tasks: BackgroundTasks,
        listener: LegListener,
    ) -> None:
        self.decode: Leg | None = None
        self.prefill: Leg | None = None
        self._request = request
        self._workers = workers
        self._tasks = tasks
        self._listener = listener

    def take(self) -> Placement | NotNow:
        """Book room for a sequence that has not begun, where placement says; nothing changes when there is none."""
        workers = self._workers()
        placement = place([worker.load() for worker in workers], max_total_tokens=self._request.max_total_tokens)
        return self._settle(placement, workers)

    def take_again(self) -> Placement | NotNow:
        """Book room for another attempt, keeping the legs that are left; nothing changes when there is none."""
        workers = self._workers()
        placement = place_again(
            [worker.load() for worker in workers],
            max_total_tokens=self._request.max_total_tokens,
            keep_decode=self.decode.worker.hello.worker_id if self.decode else None,
            keep_prefill=self.prefill.worker.hello.worker_id if self.prefill else None,
        )
        return self._settle(placement, workers)

    def give_up(self, leg: Leg | None) -> None:
        """Free the leg's room here and on its worker. Idempotent, and never blocks."""
        if leg is None:
            return
        if leg is self.decode:
            self.decode = None
        if leg is self.prefill:
            self.prefill = None
        leg.detach()
        if leg.attempt and not leg.is_released:
            leg.is_released = True
            self._tasks.spawn(_release(leg))

    def give_up_both(self) -> None:
        self.give_up(self.decode)
        self.give_up(self.prefill)

    def _settle(self, placement: Placement | NotNow, workers: Sequence[RegisteredWorker]) -> Placement | NotNow:
        if isinstance(placement, NotNow):
            return placement
        by_id = {worker.hello.worker_id: worker for worker in workers}
        key = self._request.key
        decode, prefill = by_id[placement.decode], by_id[placement.prefill]
        if self.decode is None or self.decode.worker is not decode:
            self.give_up(self.decode)
            num_tokens = self._request.max_total_tokens
            leg = Leg(worker=decode, phase=PhaseName.DECODE, key=key, listener=self._listener, num_tokens=num_tokens)
            self.decode = decode.attach(leg)
        if self.prefill is None or self.prefill.worker is not prefill:
            self.give_up(self.prefill)
            num_tokens = self._request.num_prompt_tokens
            leg = Leg(worker=prefill, phase=PhaseName.PREFILL, key=key, listener=self._listener, num_prefill_tokens=num_tokens)
            self.prefill = prefill.attach(leg)
        self.prefill.is_wanted = True
        return placement


async def _release(leg: Leg) -> None:
    """A hint that frees the worker's pages sooner; when it does not arrive, the lease runs out."""
    with contextlib.suppress(Refused, WorkerLost):
        await leg.worker.calls.release(leg.phase, leg.key, leg.attempt)
