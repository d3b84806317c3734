from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from llm_engine.page_hash import page_hashes
from llm_engine.page_pool import PagePool
from serving_core.clock import ManualClock
from serving_core.errors import OutOfPages
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.page_state import PageOwner, PageState
from tests.pages import assert_no_leaks

NUM_PAGES = 12
NEXT = {PageState.RESERVED: PageState.FILLING, PageState.FILLING: PageState.USED}

Text = tuple[int, ...]
texts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


class Held:
    """One text's pages, a token each, and what the model knows of them. The first ``num_shared`` were found in the index."""

    def __init__(self, text: Text, page_ids: tuple[PageId, ...], num_shared: int, owner: PageOwner, state: PageState) -> None:
        self.text = text
        self.page_ids = page_ids
        self.num_shared = num_shared
        self.owner = owner
        self.state = state  # of those that are not shared
        self.is_sending = False

    @property
    def own_page_ids(self) -> tuple[PageId, ...]:
        return self.page_ids[self.num_shared :]


class PagePoolMachine(RuleBasedStateMachine):
    """Any order of pool calls against plain lists of who holds what, and a plain dict of what is known, by the texts."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.pool = PagePool(NUM_PAGES, 1, self.clock)
        self.held: list[Held] = []
        self.known: dict[Text, PageId] = {}
        self.idle: list[PageId] = []  # the oldest first
        self.distrusted: set[PageId] = set()
        self.generations = [0] * NUM_PAGES
        self.num_owners = 0

    def _new_owner(self) -> PageOwner:
        self.num_owners += 1
        return PageOwner(key=SequenceKey(RequestId(f"r{self.num_owners}")), attempt=1)

    def _owners(self, page_id: PageId) -> list[PageOwner]:
        return [held.owner for held in self.held if page_id in held.page_ids]

    def _text_of(self, page_id: PageId) -> Text | None:
        return next((text for text, known in self.known.items() if known == page_id), None)

    def _forget(self, page_id: PageId) -> None:
        """And every text that goes on from what it holds."""
        beginning = self._text_of(page_id)
        if beginning is None:
            return
        for text in [text for text in self.known if text[: len(beginning)] == beginning]:
            gone = self.known.pop(text)
            if gone in self.idle:
                self.idle.remove(gone)

    @rule(target=holdings, text=texts, state=st.sampled_from([PageState.USED, PageState.RESERVED]))
    def begin(self, text: Text, state: PageState) -> Held:
        """As a phase does: find, adopt, allocate the rest."""
        owner = self._new_owner()
        found = self.pool.find(page_hashes(text[:-1], page_size=1, salt=b""))
        expected: list[PageId] = []
        while (page_id := self.known.get(text[: len(expected) + 1])) is not None and len(expected) < len(text) - 1:
            expected.append(page_id)
        assert found == tuple(expected)
        num_fresh = len(text) - len(found)
        is_enough = self.pool.num_to_take(len(text), found) <= self.pool.num_available
        self.pool.adopt(found, owner)
        self.idle = [page_id for page_id in self.idle if page_id not in found]
        free = {PageId(number) for number in range(NUM_PAGES)} - set(self.idle)
        free = {page_id for page_id in free if not self._owners(page_id) and page_id not in found}
        try:
            fresh = self.pool.allocate(num_fresh, owner, state)
        except OutOfPages:
            assert not is_enough
            self.pool.release(found, owner)
            for page_id in reversed(found):
                if not self._owners(page_id):
                    self.idle.append(page_id)
            return Held(text, (), 0, owner, state)
        assert is_enough
        while len(free) < num_fresh:
            oldest = self.idle[0]
            before = set(self.idle)
            self._forget(oldest)
            free |= before - set(self.idle)
        assert set(fresh) <= free
        for page_id in fresh:
            self.generations[page_id] += 1
        held = Held(text, found + fresh, len(found), owner, state)
        self.held.append(held)
        return held

    @rule(held=holdings)
    def move_on(self, held: Held) -> None:
        if held in self.held and held.state in NEXT:
            held.state = NEXT[held.state]
            self.pool.move(held.own_page_ids, held.owner, held.state)

    @rule(held=holdings)
    def send(self, held: Held) -> None:
        if held in self.held and held.state is PageState.USED:
            held.is_sending = True
            self.pool.send(held.page_ids, held.owner)

    @rule(held=holdings, num_pages=st.integers(1, 5))
    def publish(self, held: Held, num_pages: int) -> None:
        if held in self.held and held.state is PageState.USED:
            page_ids = held.page_ids[:num_pages]
            self.pool.publish(page_hashes(held.text, page_size=1, salt=b"")[:num_pages], page_ids, held.owner)
            for end, page_id in enumerate(page_ids, start=1):
                if page_id in self.distrusted:
                    break
                self.known.setdefault(held.text[:end], page_id)

    @rule(held=holdings)
    def forget(self, held: Held) -> None:
        if held in self.held:
            self.pool.forget(held.page_ids)
            for page_id in held.page_ids:
                self._forget(page_id)
            self.distrusted |= set(held.page_ids)

    @rule(held=holdings)
    def reissue(self, held: Held) -> None:
        if held in self.held and not any(self._text_of(page_id) or len(self._owners(page_id)) > 1 for page_id in held.page_ids):
            owner = self._new_owner()
            self.pool.reissue(held.page_ids, held.owner, owner)
            held.owner, held.state, held.num_shared, held.is_sending = owner, PageState.RESERVED, 0, False
            self.distrusted -= set(held.page_ids)
            for page_id in held.page_ids:
                self.generations[page_id] += 1

    @rule(held=holdings)
    def rename(self, held: Held) -> None:
        if held in self.held:
            owner = self._new_owner()
            self.pool.rename_owner(held.page_ids, held.owner, owner)
            held.owner = owner

    @rule(held=consumes(holdings))
    def release(self, held: Held) -> None:
        if held in self.held:
            self.pool.release(held.page_ids, held.owner)
            self.held.remove(held)
            self.distrusted = {page_id for page_id in self.distrusted if self._owners(page_id)}
            for page_id in reversed(held.page_ids):
                if self._text_of(page_id) is not None and not self._owners(page_id):
                    self.idle.append(page_id)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def _expected_state(self, page_id: PageId) -> PageState:
        if page_id in self.idle:
            return PageState.CACHED
        holders = [held for held in self.held if page_id in held.page_ids]
        if any(held.is_sending for held in holders):
            return PageState.SENDING
        own = next((held.state for held in holders if page_id in held.own_page_ids), PageState.USED)
        return own if holders else PageState.FREE

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        snapshot = self.pool.snapshot()
        assert snapshot.is_sum_ok
        records = {record.page_id: record for record in snapshot.pages}
        for number in range(NUM_PAGES):
            page_id = PageId(number)
            expected = self._expected_state(page_id)
            assert self.pool.state(page_id) is expected
            assert (page_id in records) == (expected is not PageState.FREE)
            if record := records.get(page_id):
                assert set(record.owners) == set(self._owners(page_id))
                assert len(record.owners) == len(self._owners(page_id))
                assert record.state is expected
                assert record.generation == self.generations[page_id]
                assert record.age_s >= 0
        num_free = sum(self._expected_state(PageId(number)) is PageState.FREE for number in range(NUM_PAGES))
        assert self.pool.num_available == num_free + len(self.idle)

    def teardown(self) -> None:
        for held in self.held:
            self.pool.release(held.page_ids, held.owner)
        assert_no_leaks(self.pool)
        assert self.pool.num_available == NUM_PAGES


TestPagePoolMachine = PagePoolMachine.TestCase
TestPagePoolMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
