"""Who owns which page of one worker: states, owners and generations as plain numbers.

Owns the accounting and nothing else; it has never seen the memory that the page ids stand for. Used by the engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llm_engine.page_line import PageLine
from serving_core.clock import Clock
from serving_core.errors import OutOfPages
from serving_core.ids import PageId
from serving_core.page_state import PageOwner, PageRecord, PagesSnapshot, PageState

# From -> to, for pages that keep their owner. Any state but free falls back to free when its last owner lets go. Nothing moves
# to cached or quarantined until a prefix index or a transport with posted receives exists; their counts stay 0 until then.
_MOVES: dict[PageState, frozenset[PageState]] = {
    PageState.RESERVED: frozenset({PageState.FILLING}),
    PageState.FILLING: frozenset({PageState.USED}),
    PageState.USED: frozenset({PageState.SENDING}),
    PageState.SENDING: frozenset(),
}
_FIRST_STATES = (PageState.USED, PageState.RESERVED)


class PagePool:
    """The pages ``0 .. num_pages - 1`` of one worker, each in exactly one ``PageState``.

    A page that is not free has at least one owner, and one owner may hold several claims on it. Misuse (releasing what is not
    owned, a move that the life of a page does not know) is a bug of the caller and fails an assertion before anything changes.
    ``line`` is for phases that share the pool and wait for pages; the pool itself gives to whoever asks.
    """

    def __init__(self, num_pages: int, page_size: int, clock: Clock) -> None:
        assert num_pages >= 1
        assert page_size >= 1
        self.num_pages = num_pages
        self.page_size = page_size
        self.line = PageLine()
        self._clock = clock
        # The last given back is the next taken, so that it may be warm in the caches.
        self._free = [PageId(number) for number in reversed(range(num_pages))]
        self._states = [PageState.FREE] * num_pages
        self._owners: list[list[PageOwner]] = [[] for _ in range(num_pages)]
        self._generations = [0] * num_pages
        self._changed_at = [clock.now()] * num_pages
        self._counts = dict.fromkeys(PageState, 0)
        self._counts[PageState.FREE] = num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def counts(self) -> dict[PageState, int]:
        """Pages in each state; every state is named."""
        return dict(self._counts)

    def generation(self, page_id: PageId) -> int:
        """How often the page was allocated or issued anew. What was promised under a lower number is void."""
        return self._generations[page_id]

    def state(self, page_id: PageId) -> PageState:
        return self._states[page_id]

    def owners(self, page_id: PageId) -> tuple[PageOwner, ...]:
        """One entry a claim, oldest first; empty for a free page."""
        return tuple(self._owners[page_id])

    def allocate(self, num_pages: int, owner: PageOwner, state: PageState) -> tuple[PageId, ...]:
        """Take free pages for ``owner``, in state USED or RESERVED, with new generations.

        Raises ``OutOfPages`` when fewer are free; then none is taken.
        """
        assert state in _FIRST_STATES, f"a page cannot begin as {state.value}"
        if num_pages > len(self._free):
            raise OutOfPages(num_requested=num_pages, num_free=len(self._free))
        page_ids = tuple(self._free.pop() for _ in range(num_pages))
        for page_id in page_ids:
            self._generations[page_id] += 1
            self._owners[page_id].append(owner)
            self._set_state(page_id, state)
        return page_ids

    def adopt(self, page_ids: Sequence[PageId], owner: PageOwner) -> None:
        """Add one claim of ``owner`` to each page, which must be used: they are shared from now on."""
        for page_id in page_ids:
            state = self._states[page_id]
            assert state is PageState.USED, f"page {page_id} is {state.value}, only a used page can be shared"
        for page_id in page_ids:
            self._owners[page_id].append(owner)

    def move(self, page_ids: Sequence[PageId], owner: PageOwner, state: PageState) -> None:
        """Take pages that ``owner`` alone holds one step along the life of a page."""
        self._require_sole_owner(page_ids, owner)
        for page_id in page_ids:
            old = self._states[page_id]
            assert state in _MOVES[old], f"page {page_id} cannot go from {old.value} to {state.value}"
        for page_id in page_ids:
            self._set_state(page_id, state)

    def rename_owner(self, page_ids: Sequence[PageId], old: PageOwner, new: PageOwner) -> None:
        """Put ``new`` in the place of the sole owner ``old``; state, generation and content stay."""
        self._require_sole_owner(page_ids, old)
        for page_id in page_ids:
            self._owners[page_id] = [new]

    def reissue(self, page_ids: Sequence[PageId], old: PageOwner, new: PageOwner) -> None:
        """Promise pages held by ``old`` alone to ``new``: reserved again, under new generations, their content void."""
        self._require_sole_owner(page_ids, old)
        for page_id in page_ids:
            self._owners[page_id] = [new]
            self._generations[page_id] += 1
            self._set_state(page_id, PageState.RESERVED)

    def release(self, page_ids: Sequence[PageId], owner: PageOwner) -> None:
        """Drop one claim of ``owner`` on each page; a page without a claim is free."""
        for page_id in page_ids:
            assert owner in self._owners[page_id], f"page {page_id} is not owned by {_name(owner)}"
        for page_id in page_ids:
            owners = self._owners[page_id]
            owners.remove(owner)
            if not owners:
                self._set_state(page_id, PageState.FREE)
                self._free.append(page_id)

    def check(self) -> None:
        """Raises ``AssertionError`` naming the first sum or owner that is wrong. Walks every page: for idle moments."""
        total = sum(self._counts.values())
        assert total == self.num_pages, f"the states sum to {total} of {self.num_pages} pages"
        for state, count in self._counts.items():
            walked = self._states.count(state)
            assert walked == count, f"{count} pages are counted as {state.value}, {walked} are"
        num_free = self._counts[PageState.FREE]
        assert len(self._free) == num_free, f"the free list holds {len(self._free)} pages, {num_free} are counted as free"
        assert len(set(self._free)) == len(self._free), "the free list names a page twice"
        for page_id in self._free:
            state = self._states[page_id]
            assert state is PageState.FREE, f"page {page_id} is in the free list and {state.value}"
        for number, owners in enumerate(self._owners):
            state = self._states[number]
            if state is PageState.FREE:
                assert not owners, f"page {number} is free and owned by {_names(owners)}"
            else:
                assert owners, f"page {number} is {state.value} and has no owner"
            if state is not PageState.FREE and state is not PageState.USED:
                assert len(owners) == 1, f"page {number} is {state.value} and shared by {_names(owners)}"

    def snapshot(self, *, is_summary: bool = False) -> PagesSnapshot:
        """A picture of this moment: counts always, the pages that are not free unless only a summary is wanted."""
        now = self._clock.now()
        pages = tuple(
            PageRecord(
                page_id=PageId(number),
                generation=self._generations[number],
                state=state,
                owners=tuple(self._owners[number]),
                age_s=now - self._changed_at[number],
            )
            for number, state in enumerate(self._states)
            if state is not PageState.FREE and not is_summary
        )
        return PagesSnapshot(page_size=self.page_size, num_pages=self.num_pages, counts=self.counts(), pages=pages)

    def _set_state(self, page_id: PageId, state: PageState) -> None:
        self._counts[self._states[page_id]] -= 1
        self._counts[state] += 1
        self._states[page_id] = state
        self._changed_at[page_id] = self._clock.now()

    def _require_sole_owner(self, page_ids: Sequence[PageId], owner: PageOwner) -> None:
        for page_id in page_ids:
            owners = self._owners[page_id]
            assert owners == [owner], f"page {page_id} is owned by {_names(owners) or 'nobody'}, not by {_name(owner)} alone"


def _name(owner: PageOwner) -> str:
    return f"{owner.key} attempt {owner.attempt}"


def _names(owners: Iterable[PageOwner]) -> str:
    return ", ".join(_name(owner) for owner in owners)
