"""How often one sequence may fail, and how long it pauses before it is tried again. Pure; knows no worker and no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The same for every sequence of a router.

    ``max_attempts`` is how many attempts in a row may fail without a new token. The pause before the next one doubles from
    ``first_pause_s`` up to ``max_pause_s``.
    """

    max_attempts: int = 8
    first_pause_s: float = 0.05
    max_pause_s: float = 2.0


class RetryBudget:
    """What one sequence has left. ``draw`` gives a number from 0 up to 1 and spreads those that failed together.

    A new token restores it in full: workers that die under a long answer do not use it up, while a sequence that brings its
    workers down never gets beyond the token that does it.
    """

    def __init__(self, policy: RetryPolicy, draw: Callable[[], float]) -> None:
        self._policy = policy
        self._draw = draw
        self.num_failures = 0
        """In a row, without a new token between them."""

    def restore(self) -> None:
        """There is a new token."""
        self.num_failures = 0

    def spend(self) -> float | None:
        """One more attempt has failed. Returns the seconds to pause before the next, half of them by chance, or None when there
        must not be one."""
        self.num_failures += 1
        if self.num_failures >= self._policy.max_attempts:
            return None
        pause_s = min(self._policy.max_pause_s, self._policy.first_pause_s * 2.0 ** (self.num_failures - 1))
        return pause_s * (0.5 + 0.5 * self._draw())
