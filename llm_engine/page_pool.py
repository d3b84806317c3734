"""Who owns which page of one worker: states, owners and generations as plain numbers.

Owns the accounting and nothing else; it has never seen the memory that the page ids stand for. Used by the engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llm_engine.page_hash import PageHash
from llm_engine.page_line import PageLine
from llm_engine.prefix_index import PrefixIndex
from serving_core.clock import Clock
from serving_core.errors import OutOfPages
from serving_core.ids import PageId
from serving_core.page_state import PageOwner, PageRecord, PagesSnapshot, PageState

# From -> to, for pages with one owner, who keeps them. Nothing moves to quarantined: no transport posts a receive into a page.
_MOVES: dict[PageState, frozenset[PageState]] = {
    PageState.RESERVED: frozenset({PageState.FILLING}),
    PageState.FILLING: frozenset({PageState.USED}),
}
_FIRST_STATES = (PageState.USED, PageState.RESERVED)
_COMPLETE_STATES = (PageState.USED, PageState.SENDING)
"""Of pages with owners: nobody writes any more into those of them that are in the prefix index, so they may be shared."""


class PagePool:
    """The pages ``0 .. num_pages - 1`` of one worker, each in exactly one ``PageState``.

    A page has an owner exactly while it is neither free nor cached, and one owner may hold several claims on it. What is
    *published* to the prefix index stays, cached, when its last owner lets go, until somebody adopts it or takes it for
    something else. Misuse (releasing what is not owned, a move that the life of a page does not know) is a bug of the caller
    and fails an assertion before anything changes. ``line`` is for phases that share the pool and wait for pages; the pool
    itself gives to whoever asks.
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
        self._senders: dict[PageId, set[PageOwner]] = {}  # of pages that are sending
        self._index = PrefixIndex()
        self._distrusted: set[PageId] = set()  # with an owner, and never to be published
        self._generations = [0] * num_pages
        self._changed_at = [clock.now()] * num_pages
        self._counts = dict.fromkeys(PageState, 0)
        self._counts[PageState.FREE] = num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: the free ones, and the cached ones, which then are given up."""
        return len(self._free) + self._counts[PageState.CACHED]

    def counts(self) -> dict[PageState, int]:
        """Pages in each state; every state is named."""
        return dict(self._counts)

    def generation(self, page_id: PageId) -> int:
        """How often the page was allocated or issued anew. What was promised under a lower number is void."""
        return self._generations[page_id]

    def state(self, page_id: PageId) -> PageState:
        return self._states[page_id]

    def owners(self, page_id: PageId) -> tuple[PageOwner, ...]:
        """One entry a claim, oldest first; empty for a page that is free or cached."""
        return tuple(self._owners[page_id])

    def allocate(self, num_pages: int, owner: PageOwner, state: PageState) -> tuple[PageId, ...]:
        """Take pages for ``owner``, in state USED or RESERVED, with new generations: free ones first, then those cached ones
        that were used least recently.

        Raises ``OutOfPages`` when fewer are available; then none is taken.
        """
        assert state in _FIRST_STATES, f"a page cannot begin as {state.value}"
        if num_pages > self.num_available:
            raise OutOfPages(num_requested=num_pages, num_free=self.num_available)
        while num_pages > len(self._free):
            self._give_up(self._index.evict_oldest())
        page_ids = tuple(self._free.pop() for _ in range(num_pages))
        for page_id in page_ids:
            self._generations[page_id] += 1
            self._owners[page_id].append(owner)
            self._set_state(page_id, state)
        return page_ids

    def adopt(self, page_ids: Sequence[PageId], owner: PageOwner) -> None:
        """Add one claim of ``owner`` to each page, which must be complete, with an owner or cached: they may be shared from now
        on."""
        for page_id in page_ids:
            state = self._states[page_id]
            is_complete = state in _COMPLETE_STATES or state is PageState.CACHED
            assert is_complete, f"page {page_id} is {state.value}, only a complete page can be shared"
        for page_id in page_ids:
            self._owners[page_id].append(owner)
            if self._states[page_id] is PageState.CACHED:
                self._index.revive(page_id)
                self._set_state(page_id, PageState.USED)

    def move(self, page_ids: Sequence[PageId], owner: PageOwner, state: PageState) -> None:
        """Take pages that ``owner`` alone holds one step along the life of a page. For those to be sent: ``send``."""
        self._require_sole_owner(page_ids, owner)
        for page_id in page_ids:
            old = self._states[page_id]
            assert state in _MOVES.get(old, ()), f"page {page_id} cannot go from {old.value} to {state.value}"
        for page_id in page_ids:
            self._set_state(page_id, state)

    def send(self, page_ids: Sequence[PageId], owner: PageOwner) -> None:
        """``owner`` sends these pages from now on, until it releases them. A shared page is *sending* while any owner sends
        it."""
        self._require_owner(page_ids, owner)
        for page_id in page_ids:
            state = self._states[page_id]
            assert state in _COMPLETE_STATES, f"page {page_id} is {state.value}, only a complete page can be sent"
        for page_id in page_ids:
            self._senders.setdefault(page_id, set()).add(owner)
            if self._states[page_id] is PageState.USED:
                self._set_state(page_id, PageState.SENDING)

    def rename_owner(self, page_ids: Sequence[PageId], old: PageOwner, new: PageOwner) -> None:
        """Put ``new`` in the place of the owner ``old``, for one claim on each page; state, generation and content stay."""
        self._require_owner(page_ids, old)
        for page_id in page_ids:
            owners = self._owners[page_id]
            owners[owners.index(old)] = new
            senders = self._senders.get(page_id, set())
            if old in senders:
                senders.add(new)
                self._forget_sender(page_id, old)

    def reissue(self, page_ids: Sequence[PageId], old: PageOwner, new: PageOwner) -> None:
        """Promise pages held by ``old`` alone to ``new``: reserved again, under new generations, their content void."""
        self._require_sole_owner(page_ids, old)
        for page_id in page_ids:
            assert page_id not in self._index, f"page {page_id} is in the prefix index and may not be written again"
        self._distrusted.difference_update(page_ids)
        for page_id in page_ids:
            self._senders.pop(page_id, None)
            self._owners[page_id] = [new]
            self._generations[page_id] += 1
            self._set_state(page_id, PageState.RESERVED)

    def release(self, page_ids: Sequence[PageId], owner: PageOwner) -> None:
        """Drop one claim of ``owner`` on each page. A page without a claim is cached if it is in the prefix index, else free.

        ``page_ids`` are in a text's order: what comes first is kept longest.
        """
        self._require_owner(page_ids, owner)
        idle: list[PageId] = []
        for page_id in page_ids:
            owners = self._owners[page_id]
            owners.remove(owner)
            self._forget_sender(page_id, owner)
            if not owners and page_id in self._index:
                idle.append(page_id)
            elif not owners:
                self._distrusted.discard(page_id)
                self._set_state(page_id, PageState.FREE)
                self._free.append(page_id)
            elif self._states[page_id] is PageState.SENDING and page_id not in self._senders:
                self._set_state(page_id, PageState.USED)
        for page_id in reversed(idle):
            self._index.retire(page_id)
            self._set_state(page_id, PageState.CACHED)

    # What pages hold

    def find(self, hashes: Sequence[PageHash]) -> tuple[PageId, ...]:
        """Pages that hold the beginning of a text, as far as it is known: to be adopted before anything is allocated."""
        return self._index.find(hashes)

    def num_to_take(self, num_pages: int, found: Sequence[PageId]) -> int:
        """How many of the available pages go to a text of ``num_pages`` pages of which ``found`` are the first: those that it
        shares with an owner take none."""
        return num_pages - sum(self._states[page_id] is not PageState.CACHED for page_id in found)

    def publish(self, hashes: Sequence[PageHash], page_ids: Sequence[PageId], owner: PageOwner) -> None:
        """Enter the first pages of a text, all of them complete, into the prefix index, up to one that is not to be trusted.
        Idempotent. ``owner`` owns them, and nobody writes into them from now on."""
        self._require_owner(page_ids, owner)
        for page_id in page_ids:
            state = self._states[page_id]
            assert state in _COMPLETE_STATES, f"page {page_id} is {state.value}, only a complete page can be published"
        num_trusted = next((n for n, page_id in enumerate(page_ids) if page_id in self._distrusted), len(page_ids))
        self._index.add(hashes[:num_trusted], page_ids[:num_trusted])

    def forget(self, page_ids: Sequence[PageId]) -> None:
        """Take pages out of the prefix index, with all that comes after them: what they hold is not to be trusted. Those that
        somebody still owns stay out of it until they hold something else."""
        for page_id in page_ids:
            if self._owners[page_id]:
                self._distrusted.add(page_id)
            self._give_up(self._index.forget(page_id))

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
            if state in (PageState.FREE, PageState.CACHED):
                assert not owners, f"page {number} is {state.value} and owned by {_names(owners)}"
            else:
                assert owners, f"page {number} is {state.value} and has no owner"
            if owners and state not in _COMPLETE_STATES:
                assert len(owners) == 1, f"page {number} is {state.value} and shared by {_names(owners)}"
            senders = self._senders.get(PageId(number), set())
            assert senders <= set(owners), f"page {number} is sent by {_names(senders)} and owned by {_names(owners)}"
            assert (state is PageState.SENDING) == bool(senders), f"page {number} is {state.value} with {len(senders)} senders"
        for page_id in self._distrusted:
            assert self._owners[page_id], f"page {page_id} is not trusted and nobody's"
            assert page_id not in self._index, f"page {page_id} is not trusted and in the prefix index"
        cached = [PageId(number) for number, state in enumerate(self._states) if state is PageState.CACHED]
        self._index.check(cached)

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

    def _give_up(self, page_ids: Iterable[PageId]) -> None:
        """The index has forgotten these pages; those that nobody owns are free."""
        for page_id in page_ids:
            if self._states[page_id] is PageState.CACHED:
                self._set_state(page_id, PageState.FREE)
                self._free.append(page_id)

    def _forget_sender(self, page_id: PageId, owner: PageOwner) -> None:
        """Unless it has another claim."""
        senders = self._senders.get(page_id)
        if senders is None or owner in self._owners[page_id]:
            return
        senders.discard(owner)
        if not senders:
            del self._senders[page_id]

    def _require_owner(self, page_ids: Sequence[PageId], owner: PageOwner) -> None:
        for page_id in page_ids:
            assert owner in self._owners[page_id], f"page {page_id} is not owned by {_name(owner)}"

    def _require_sole_owner(self, page_ids: Sequence[PageId], owner: PageOwner) -> None:
        for page_id in page_ids:
            owners = self._owners[page_id]
            assert owners == [owner], f"page {page_id} is owned by {_names(owners) or 'nobody'}, not by {_name(owner)} alone"


def _name(owner: PageOwner) -> str:
    return f"{owner.key} attempt {owner.attempt}"


def _names(owners: Iterable[PageOwner]) -> str:
    return ", ".join(_name(owner) for owner in owners)
