"""How long to wait before trying a broken way again."""

from __future__ import annotations


class Backoff:
    """Delays that double from ``first_s`` up to ``max_s``, and start over after progress."""

    def __init__(self, *, first_s: float = 0.05, max_s: float = 1.0) -> None:
        assert 0 < first_s <= max_s
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def next_delay_s(self) -> float:
        """The delay before the next try."""
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._max_s)
        return delay_s

    def reset(self) -> None:
        """Something went through: the next failure is a new one."""
        self._next_s = self._first_s
