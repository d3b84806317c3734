"""The router's claim on one worker for one sequence in one phase. Leases are renewed, events routed and room counted by legs
alone, so that nothing else has to be kept in step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from serving_core.ids import SequenceKey
from serving_core.page_demand import PageDemand
from serving_core.token_event import SequenceEvent
from serving_core.worker_status import PhaseName

if TYPE_CHECKING:  # each knows the other: a leg is on a worker, which lists its legs
    from router.registered_worker import RegisteredWorker


class LegListener(Protocol):
    """Whose leg it is. Both methods are called on the router's loop and return at once."""

    def on_event(self, leg: Leg, event: SequenceEvent) -> None:
        """The worker told something about the leg's sequence, of whatever attempt."""

    def on_worker_lost(self, leg: Leg) -> None:
        """The worker is gone, silent or replaced; nothing more will come from it. The leg is detached already."""


class Leg:
    """A claim on ``worker`` for ``key`` in ``phase``.

    ``demand`` is what pages are booked for (decode) and None for prefill, ``num_prefill_tokens`` the prompt still to be
    computed (prefill) and 0 for decode. ``attempt`` is the highest one that was sent to the worker, 0 when none was.
    """

    def __init__(
        self,
        *,
        worker: RegisteredWorker,
        phase: PhaseName,
        key: SequenceKey,
        listener: LegListener,
        demand: PageDemand | None = None,
        num_prefill_tokens: int = 0,
    ) -> None:
        self.worker = worker
        self.phase = phase
        self.key = key
        self.listener = listener
        self.demand = demand
        self.num_prefill_tokens = num_prefill_tokens
        self.attempt = 0
        self.is_accepted = False
        """Whether the worker has agreed to it, so that its end frees something there."""
        self.is_wanted = True
        """Whether the lease on the worker is still to be renewed."""
        self.is_released = False
        """Whether the worker has been, or is being, told to release it."""

    def detach(self) -> None:
        """Give back the room booked on the worker and hear no more of it. Idempotent."""
        self.worker.detach(self)

    @property
    def num_pages(self) -> int:
        """Pages booked in the worker's pool."""
        return self.demand.num_booked_pages(self.worker.hello.layout.page_size) if self.demand else 0

    def end_prefill(self) -> None:
        """Token 0 is there: the prompt no longer counts as queued."""
        if self.num_prefill_tokens:
            self.num_prefill_tokens = 0
            self.worker.tell_changed()
