"""What must hold of a page pool when everything has ended."""

from __future__ import annotations

from llm_engine.page_pool import PagePool
from serving_core.page_state import PageState


def assert_no_leaks(pool: PagePool) -> None:
    """Every page is free or cached, and the pool's sums are right."""
    pool.check()
    held = {state.value: count for state, count in pool.counts().items() if count}
    allowed = {PageState.FREE.value, PageState.CACHED.value}
    assert held.keys() <= allowed, f"pages are left behind: {held}, {pool.snapshot().pages}"
