"""The two legs of one sequence: which workers it is on, and their release. Knows neither tokens nor attempts' outcomes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from router.background_tasks import BackgroundTasks
from router.leg import Leg, LegListener
from router.placement import NotNow, Placement, place, place_again
from router.registered_worker import RegisteredWorker
from serving_core.errors import Refused, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.ids import WorkerId
from serving_core.page_demand import PageDemand
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
        self._avoided: set[RegisteredWorker] = set()

    @property
    def is_holding(self) -> bool:
        """Whether a worker still has something for the sequence."""
        return self.decode is not None or self.prefill is not None

    def take(self, demand: PageDemand) -> Placement | NotNow:
        """Book room for a sequence that holds nothing, where placement says; nothing changes when there is none."""
        assert not self.is_holding
        workers = self._workers()
        placement = place([worker.load() for worker in workers], demand=demand, avoid=self._avoided_ids(workers))
        return self._settle(placement, demand, workers)

    def take_again(self, demand: PageDemand) -> Placement | NotNow:
        """Book room for another attempt, keeping the legs that are left; nothing changes when there is none."""
        workers = self._workers()
        placement = place_again(
            [worker.load() for worker in workers],
            demand=demand,
            keep_decode=self.decode.worker.hello.worker_id if self.decode else None,
            keep_prefill=self.prefill.worker.hello.worker_id if self.prefill else None,
            avoid=self._avoided_ids(workers),
        )
        return self._settle(placement, demand, workers)

    def rebook(self, demand: PageDemand) -> None:
        """Book pages for ``demand`` on the decode worker, whether or not there is room: the sequence has grown already."""
        if self.decode is not None:
            self.decode.worker.rebook(self.decode, demand)

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

    def avoid(self, worker: RegisteredWorker) -> None:
        """Give up what is on ``worker``, and from now on take this process only where there is no other."""
        self._avoided.add(worker)
        for leg in (self.decode, self.prefill):
            if leg is not None and leg.worker is worker:
                self.give_up(leg)

    def avoid_both(self) -> None:
        """The same for whatever workers there are."""
        for leg in (self.decode, self.prefill):
            if leg is not None:
                self.avoid(leg.worker)

    def avoid_nobody(self) -> None:
        """Forget who was to be avoided."""
        self._avoided.clear()

    def _avoided_ids(self, workers: Sequence[RegisteredWorker]) -> frozenset[WorkerId]:
        return frozenset(worker.hello.worker_id for worker in workers if worker in self._avoided)

    def _settle(
        self, placement: Placement | NotNow, demand: PageDemand, workers: Sequence[RegisteredWorker]
    ) -> Placement | NotNow:
        if isinstance(placement, NotNow):
            return placement
        by_id = {worker.hello.worker_id: worker for worker in workers}
        key = self._request.key
        decode, prefill = by_id[placement.decode], by_id[placement.prefill]
        if self.decode is None or self.decode.worker is not decode:
            self.give_up(self.decode)
            leg = Leg(worker=decode, phase=PhaseName.DECODE, key=key, listener=self._listener, demand=demand)
            self.decode = decode.attach(leg)
        if self.prefill is None or self.prefill.worker is not prefill:
            self.give_up(self.prefill)
            num_tokens = self._request.num_prompt_tokens
            leg = Leg(worker=prefill, phase=PhaseName.PREFILL, key=key, listener=self._listener, num_prefill_tokens=num_tokens)
            self.prefill = prefill.attach(leg)
        return placement


async def _release(leg: Leg) -> None:
    """A hint that frees the worker's pages sooner; when it does not arrive, the lease runs out."""
    with contextlib.suppress(Refused, WorkerLost):
        await leg.worker.calls.release(leg.phase, leg.key, leg.attempt)
