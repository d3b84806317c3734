"""How many pages a sequence takes of a decode worker's pool. The router books by it what the decode worker reserves by it."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DOUBLINGS = 30
"""More room than any window has; keeps a peer's number from becoming a large one here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDemand:
    """What one sequence needs, whatever the page size: ``num_tokens`` is prompt, log and one token more, ``max_num_tokens`` the
    sequence at its longest. After ``num_evictions`` it gets room to grow, which doubles each time, so that it ends after a few
    if not before. ``page_size`` is in tokens."""

    num_tokens: int
    max_num_tokens: int
    num_evictions: int = 0

    def num_pages(self, page_size: int) -> int:
        """Pages to reserve: those it starts with and the room to grow, as far as it can ever need them."""
        return min(-(-self.num_tokens // page_size) + self._num_growth_pages, self.max_num_pages(page_size))

    def num_booked_pages(self, page_size: int) -> int:
        """Pages that nobody else should count on: the worker keeps one free for each sequence that may still grow."""
        return min(self.num_pages(page_size) + 1, self.max_num_pages(page_size))

    def max_num_pages(self, page_size: int) -> int:
        """Pages at its longest."""
        return -(-self.max_num_tokens // page_size)

    @property
    def _num_growth_pages(self) -> int:
        """None before the first eviction, two after it and twice as many after each further one."""
        return 1 << min(self.num_evictions, _MAX_DOUBLINGS) if self.num_evictions else 0
