"""One worker process that holds a link to this router, with what it told and the legs that the router has put on it.

Knows no gRPC: calls go through ``WorkerCalls``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.leg import Leg
from router.placement import WorkerLoad
from router.worker_calls import WorkerCalls
from serving_core.ids import SequenceKey
from serving_core.page_demand import PageDemand
from serving_core.token_event import SequenceEvent
from serving_core.worker_status import PhaseName, WorkerHello, WorkerStatus

MAX_HOLD_S = 2.0
"""A worker that turned something away is asked again after so many seconds at the latest."""

MAX_SILENCE_S = 30.0
"""Statuses come every second, but between two engine steps: after so many seconds without one the engine counts as stuck."""


class RegisteredWorker:
    """One connection of one incarnation. When it ends it is never used again: the same process coming back is a new one.

    ``on_silence`` is called once when it has told no status for ``max_silence_s``: a process whose engine is stuck answers
    pings, and would be waited for without end. ``is_warm``: its caches hold what requests are to find there (see ``warm_up``);
    until then it gets none.
    """

    def __init__(
        self,
        hello: WorkerHello,
        *,
        calls: WorkerCalls,
        registered_at: float,
        on_change: Callable[[], None],
        on_silence: Callable[[RegisteredWorker], None],
        is_warm: bool = True,
        max_hold_s: float = MAX_HOLD_S,
        max_silence_s: float = MAX_SILENCE_S,
    ) -> None:
        self.hello = hello
        self.calls = calls
        self.registered_at = registered_at
        self.status: WorkerStatus | None = None
        self.lost_at: float | None = None
        self.is_warm = is_warm
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection has ended."""
        self._max_hold_s = max_hold_s
        self._hold: asyncio.TimerHandle | None = None
        self._held_for: SequenceKey | None = None
        self._on_change = on_change
        self._on_silence = on_silence
        self._max_silence_s = max_silence_s
        self._silence = self._watch_silence()
        self._legs: dict[tuple[SequenceKey, PhaseName], Leg] = {}
        self._num_booked_pages = 0

    @property
    def is_ready(self) -> bool:
        """Connected, known to run and not draining: fit for new work, whether or not it has room."""
        return self.lost_at is None and self.status is not None and not self.status.is_draining

    @property
    def num_legs(self) -> int:
        return len(self._legs)

    def load(self) -> WorkerLoad:
        """This moment's room, by the router's own count."""
        legs = self._legs.values()
        return WorkerLoad(
            worker_id=self.hello.worker_id,
            phases=self.hello.phases,
            can_take_work=self.is_ready and self._hold is None,
            page_size=self.hello.layout.page_size,
            num_free_pages=self.hello.num_pages - self._num_booked_pages,
            num_running=sum(leg.phase is PhaseName.DECODE for leg in legs),
            max_num_seqs=self.hello.max_num_seqs,
            num_queued_prefill_tokens=sum(leg.num_prefill_tokens for leg in legs),
            max_prefill_tokens_per_step=self.hello.max_prefill_tokens_per_step,
        )

    def wanted_keys(self) -> frozenset[SequenceKey]:
        """The sequences whose leases are to be renewed here."""
        return frozenset(leg.key for leg in self._legs.values() if leg.is_wanted)

    def attach(self, leg: Leg) -> Leg:
        """Book the leg's room. At most one leg a sequence and phase."""
        assert leg.worker is self
        assert (leg.key, leg.phase) not in self._legs
        self._legs[leg.key, leg.phase] = leg
        self._num_booked_pages += leg.num_pages
        return leg

    def rebook(self, leg: Leg, demand: PageDemand) -> None:
        """Book pages for ``demand`` in place of what was booked for the leg; no room is asked for. A no-op once detached."""
        if self._is_attached(leg):
            self._num_booked_pages -= leg.num_pages
            leg.demand = demand
            self._num_booked_pages += leg.num_pages

    def detach(self, leg: Leg) -> None:
        if self._is_attached(leg):
            del self._legs[leg.key, leg.phase]
            self._num_booked_pages -= leg.num_pages
            if leg.is_accepted and leg.key != self._held_for:
                self._lift_hold()
            self.tell_changed()

    def hold(self, key: SequenceKey) -> None:
        """Give no new work, since the worker has just turned ``key`` away, until something may have changed: the next status,
        the end of another sequence that it had accepted, or ``max_hold_s`` at the latest."""
        self._lift_hold()
        if self.lost_at is None:
            self._held_for = key
            self._hold = asyncio.get_running_loop().call_later(self._max_hold_s, self._on_hold_end)

    def take_status(self, status: WorkerStatus) -> None:
        if self.lost_at is not None:
            return
        self.status = status
        self._silence.cancel()
        self._silence = self._watch_silence()
        self._lift_hold()
        self.tell_changed()

    def take_event(self, event: SequenceEvent) -> None:
        """Hand the event to the leg it is about; events of sequences that are no longer here are dropped."""
        leg = self._legs.get((event.key, PhaseName.DECODE)) or self._legs.get((event.key, PhaseName.PREFILL))
        if leg is not None:
            leg.listener.on_event(leg, event)

    def lose(self, now: float) -> None:
        """The connection ended: every leg is detached and its listener told, in the order in which they came. Idempotent."""
        if self.lost_at is not None:
            return
        self.lost_at = now
        self._silence.cancel()
        self._lift_hold()
        self.gone.set_result(None)
        legs = list(self._legs.values())
        self._legs.clear()
        self._num_booked_pages = 0
        for leg in legs:
            leg.listener.on_worker_lost(leg)
        self.tell_changed()

    def become_warm(self) -> None:
        """It takes requests from now on."""
        self.is_warm = True
        self.tell_changed()

    def tell_changed(self) -> None:
        self._on_change()

    def _is_attached(self, leg: Leg) -> bool:
        return self._legs.get((leg.key, leg.phase)) is leg

    def _watch_silence(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._max_silence_s, self._on_silence, self)

    def _on_hold_end(self) -> None:
        self._lift_hold()
        self.tell_changed()

    def _lift_hold(self) -> None:
        if self._hold is not None:
            self._hold.cancel()
            self._hold = self._held_for = None
