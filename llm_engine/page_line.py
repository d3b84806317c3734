"""Whose turn it is for free pages where two phases share one pool, so that neither keeps the other waiting for ever."""

from __future__ import annotations

from serving_core.worker_status import PhaseName


class PageLine:
    """The first in each phase's own line, and since when it waits. Whoever came later leaves it the pages that it waits for.

    A phase says anew in each step who is its first, and at once when that one leaves without having got its pages.
    """

    def __init__(self) -> None:
        self._first: dict[PhaseName, tuple[int, float]] = {}

    def wait(self, phase: PhaseName, num_pages: int, since: float) -> None:
        """The first in the phase's line needs ``num_pages`` and has waited since that time, by the worker's clock."""
        self._first[phase] = (num_pages, since)

    def leave(self, phase: PhaseName) -> None:
        """Nobody of the phase waits. Idempotent."""
        self._first.pop(phase, None)

    def num_kept_from(self, phase: PhaseName, since: float) -> int:
        """Free pages that one of ``phase`` that came at ``since`` has to leave to others."""
        return sum(num_pages for other, (num_pages, came) in self._first.items() if other is not phase and came < since)
