"""Time as a constructor argument. Durations and deadlines are seconds on one process's monotonic clock; they never cross a
process border as timestamps, only as remaining seconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Anything that tells monotonic seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary, fixed point; never goes back."""


class MonotonicClock:
    """The process's monotonic clock. It runs on while the process is stopped by a signal."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that tests move by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now += seconds
