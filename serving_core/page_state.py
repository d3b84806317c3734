"""Who owns a page: the states of the page pool and the snapshot a worker publishes of it.

free -> used (one or more owners, counted) -> cached (prefix index, evictable) -> free, or -> used again
prefill also:  used -> sending -> free or cached; a page with several owners is sending while any of them sends it
decode also:   free -> reserved -> filling -> used, and free -> used where a sequence grows
both:          filling -> quarantined -> free   where a posted receive was aborted
The counts of all states always sum to the number of pages in the pool.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from serving_core.ids import PageId, SequenceKey


class PageState(enum.Enum):
    """Where in its life a page is. The values are the words of ``/admin/pages``."""

    FREE = "free"
    USED = "used"
    CACHED = "cached"
    RESERVED = "reserved"
    FILLING = "filling"
    SENDING = "sending"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOwner:
    """One claim on a page: a sequence in one attempt."""

    key: SequenceKey
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRecord:
    """One page that is not free, as seen at the moment of a snapshot. ``age_s``: seconds since its state last changed. A cached
    page has no owner."""

    page_id: PageId
    generation: int
    state: PageState
    owners: tuple[PageOwner, ...]
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesSnapshot:
    """A live picture of one pool. ``counts`` names every state; ``pages`` lists every page that is not free, or nothing when
    only a summary was asked for. ``is_sum_ok``: the counts sum to ``num_pages``."""

    page_size: int
    num_pages: int
    counts: dict[PageState, int]
    pages: tuple[PageRecord, ...]

    @property
    def is_sum_ok(self) -> bool:
        return sum(self.counts.values()) == self.num_pages
