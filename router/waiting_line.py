"""The line that sequences stand in until workers can take them, new ones and those that come back. Owns order, length and
waiting times of the line; what "can take" means is the waiter's own function. Waits end by ``poke`` or a timer, never by
polling."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from serving_core.clock import Clock
from serving_core.errors import NoCapacity


@dataclass(frozen=True, slots=True, order=True)
class PlaceInLine:
    """Whose turn it is before whose: ``number`` is given at arrival and kept for life, so that coming back means the old place.
    ``since`` is the clock's time from which the present wait counts."""

    number: int
    since: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    place: PlaceInLine
    try_take: Callable[[], bool]
    turn: asyncio.Future[NoCapacity | None] = field(repr=False)


def _nothing_to_let_go() -> None:
    pass


class WaitingLine:
    """First come, first served: nobody is served before the one at the head, so a small request never overtakes a large one.

    At most ``max_waiting`` stand in line, but who comes back is always let in. Who stands there for ``worker_wait_s`` while
    ``missing_phases`` names something, or for ``max_wait_s`` in any case, gets ``NoCapacity``.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        missing_phases: Callable[[], Sequence[str]],
        worker_wait_s: float,
        max_waiting: int = 256,
        max_wait_s: float = 600.0,
        retry_after_s: float = 2.0,
    ) -> None:
        self._clock = clock
        self._missing_phases = missing_phases
        self._worker_wait_s = worker_wait_s
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._retry_after_s = retry_after_s
        self._line: list[_Waiter] = []
        self._num_arrivals = 0
        self._missing_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._line)

    def draw_place(self) -> PlaceInLine:
        """A place in line for a new arrival."""
        self._num_arrivals += 1
        return PlaceInLine(self._num_arrivals, self._clock.now())

    def renew_place(self, place: PlaceInLine) -> PlaceInLine:
        """The same place for one that was served meanwhile and is about to wait anew."""
        return replace(place, since=self._clock.now())

    async def wait_turn(
        self,
        place: PlaceInLine,
        try_take: Callable[[], bool],
        *,
        is_returning: bool = False,
        let_go: Callable[[], None] = _nothing_to_let_go,
    ) -> None:
        """Return once ``try_take``, called when this waiter is at the head, said True and took what it needs.

        ``is_returning`` admits one that was served before, whatever the length of the line. ``let_go`` is called with the place
        taken: what it sets free does not go to those behind. Raises ``NoCapacity``. When the wait is cancelled after
        ``try_take`` said True, what was taken is the caller's to give back.
        """
        if len(self._line) >= self._max_waiting and not is_returning:
            raise self._no_capacity(f"{len(self._line)} requests are waiting, which is the limit", is_queue_full=True)
        turn: asyncio.Future[NoCapacity | None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(place=place, try_take=try_take, turn=turn)
        bisect.insort(self._line, waiter, key=lambda each: each.place)
        let_go()
        self.poke()
        try:
            refusal = await turn
        finally:
            if waiter in self._line:  # cancelled: the next in line may be served now
                self._line.remove(waiter)
                self.poke()
        if refusal is not None:
            raise refusal

    def poke(self) -> None:
        """Serve from the head what can be served now. Called after every change that may help."""
        while self._line and self._line[0].try_take():
            self._dismiss(self._line[0], None)
        self._watch_time()

    def _watch_time(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._line:
            self._missing_since = None
            return
        now = self._clock.now()
        if not self._missing_phases():
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = now
        next_deadline = min(self._deadline(waiter) for waiter in self._line)
        self._timer = asyncio.get_running_loop().call_later(max(0.0, next_deadline - now), self._dismiss_overdue)

    def _deadline(self, waiter: _Waiter) -> float:
        latest = waiter.place.since + self._max_wait_s
        if self._missing_since is None:
            return latest
        return min(latest, max(waiter.place.since, self._missing_since) + self._worker_wait_s)

    def _dismiss_overdue(self) -> None:
        now = self._clock.now()
        missing = self._missing_phases()
        for waiter in [waiter for waiter in self._line if self._deadline(waiter) <= now]:
            waited = f"within {now - waiter.place.since:.1f} s"
            what = f"no ready {' and no ready '.join(missing)} worker came" if missing else "no worker had room"
            self._dismiss(waiter, self._no_capacity(f"{what} {waited}"))
        self.poke()

    def _dismiss(self, waiter: _Waiter, answer: NoCapacity | None) -> None:
        self._line.remove(waiter)
        if not waiter.turn.done():
            waiter.turn.set_result(answer)

    def _no_capacity(self, because: str, *, is_queue_full: bool = False) -> NoCapacity:
        message = f"The request cannot be taken: {because}."
        return NoCapacity(message, retry_after_s=self._retry_after_s, is_queue_full=is_queue_full)
