"""How much room to grow a sequence gets after evictions. The router asks for it, the decode worker grants it."""

from __future__ import annotations

_MAX_DOUBLINGS = 30
"""More room than any window has; keeps a peer's number from becoming a large one here."""


def num_growth_pages(num_evictions: int) -> int:
    """Pages reserved beyond those that the sequence starts with, as far as it can ever need them: none for one that was never
    evicted, two after the first eviction and twice as many after each further one."""
    return 1 << min(num_evictions, _MAX_DOUBLINGS) if num_evictions else 0
