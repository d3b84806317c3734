from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from llm_engine.page_pool import PagePool
from serving_core.clock import ManualClock
from serving_core.errors import OutOfPages
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.page_state import PageOwner, PageState
from tests.pages import assert_no_leaks

NUM_PAGES = 12


class Held:
    """One allocation and what the model knows of it."""

    def __init__(self, page_ids: tuple[PageId, ...], owner: PageOwner, state: PageState) -> None:
        self.page_ids = page_ids
        self.claims = [owner]
        self.state = state


class PagePoolMachine(RuleBasedStateMachine):
    """Any order of pool calls against a plain list of who holds what."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.pool = PagePool(NUM_PAGES, 4, self.clock)
        self.held: list[Held] = []
        self.generations = [0] * NUM_PAGES
        self.num_owners = 0

    def _new_owner(self) -> PageOwner:
        self.num_owners += 1
        return PageOwner(key=SequenceKey(RequestId(f"r{self.num_owners}")), attempt=1)

    @rule(target=holdings, num_pages=st.integers(0, 5), state=st.sampled_from([PageState.USED, PageState.RESERVED]))
    def allocate(self, num_pages: int, state: PageState) -> Held:
        owner = self._new_owner()
        is_enough = num_pages <= self.pool.num_free
        try:
            page_ids = self.pool.allocate(num_pages, owner, state)
        except OutOfPages:
            assert not is_enough
            return Held((), owner, state)
        assert is_enough
        held = Held(page_ids, owner, state)
        self.held.append(held)
        for page_id in page_ids:
            self.generations[page_id] += 1
        return held

    @rule(held=holdings)
    def adopt(self, held: Held) -> None:
        if held in self.held and held.state is PageState.USED:
            owner = self._new_owner()
            self.pool.adopt(held.page_ids, owner)
            held.claims.append(owner)

    @rule(held=holdings)
    def move_on(self, held: Held) -> None:
        following = {
            PageState.RESERVED: PageState.FILLING,
            PageState.FILLING: PageState.USED,
            PageState.USED: PageState.SENDING,
        }
        if held in self.held and len(held.claims) == 1 and held.state in following:
            held.state = following[held.state]
            self.pool.move(held.page_ids, held.claims[0], held.state)

    @rule(held=holdings)
    def reissue(self, held: Held) -> None:
        if held in self.held and len(held.claims) == 1:
            owner = self._new_owner()
            self.pool.reissue(held.page_ids, held.claims[0], owner)
            held.claims, held.state = [owner], PageState.RESERVED
            for page_id in held.page_ids:
                self.generations[page_id] += 1

    @rule(held=holdings)
    def rename(self, held: Held) -> None:
        if held in self.held and len(held.claims) == 1:
            owner = self._new_owner()
            self.pool.rename_owner(held.page_ids, held.claims[0], owner)
            held.claims = [owner]

    @rule(held=consumes(holdings))
    def release_all(self, held: Held) -> None:
        if held in self.held:
            for owner in held.claims:
                self.pool.release(held.page_ids, owner)
            self.held.remove(held)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        snapshot = self.pool.snapshot()
        assert snapshot.is_sum_ok
        expected = {page_id: held for held in self.held for page_id in held.page_ids}
        assert {record.page_id for record in snapshot.pages} == expected.keys()
        for record in snapshot.pages:
            held = expected[record.page_id]
            assert record.owners == tuple(held.claims)
            assert record.state is held.state
            assert record.generation == self.generations[record.page_id]
            assert record.age_s >= 0

    def teardown(self) -> None:
        for held in self.held:
            for owner in held.claims:
                self.pool.release(held.page_ids, owner)
        assert_no_leaks(self.pool)


TestPagePoolMachine = PagePoolMachine.TestCase
TestPagePoolMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
