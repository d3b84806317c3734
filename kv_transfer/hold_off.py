"""Which receivers a way is not to be tried to for a while, because it has just failed. Pure accounting."""

from __future__ import annotations

from serving_core.clock import Clock
from serving_core.ids import Incarnation

MAX_RECEIVERS = 256
"""A receiver that comes back is a new one, and its old self is never asked for again."""


class HoldOff:
    """After each failure for ``first_s`` seconds, then twice as long, up to ``max_s``, until something has gone through. With 0
    there is no hold-off."""

    def __init__(self, clock: Clock, *, first_s: float = 1.0, max_s: float = 60.0) -> None:
        assert 0 <= first_s <= max_s
        self._clock = clock
        self._first_s = first_s
        self._max_s = max_s
        self._held: dict[tuple[str, Incarnation], tuple[float, float]] = {}  # until when, and how long

    def remaining_s(self, address: str, incarnation: Incarnation) -> float:
        """Seconds until the next try; 0 for now."""
        until, _ = self._held.get((address, incarnation), (0.0, 0.0))
        return max(0.0, until - self._clock.now())

    def fail(self, address: str, incarnation: Incarnation) -> None:
        """The way to this receiver has failed."""
        _, last_s = self._held.pop((address, incarnation), (0.0, 0.0))
        delay_s = min(2 * last_s, self._max_s) if last_s else self._first_s
        self._held[address, incarnation] = (self._clock.now() + delay_s, delay_s)
        if len(self._held) > MAX_RECEIVERS:
            del self._held[next(iter(self._held))]

    def succeed(self, address: str, incarnation: Incarnation) -> None:
        """Something went through: the next failure is a new one."""
        self._held.pop((address, incarnation), None)
