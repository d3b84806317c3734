from __future__ import annotations

import pytest

from llm_engine.page_pool import PagePool
from serving_core.clock import ManualClock
from serving_core.errors import OutOfPages
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.page_state import PageOwner, PageState
from tests.pages import assert_no_leaks

A = PageOwner(key=SequenceKey(RequestId("a")), attempt=1)
A2 = PageOwner(key=SequenceKey(RequestId("a")), attempt=2)
B = PageOwner(key=SequenceKey(RequestId("b")), attempt=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def pool(clock: ManualClock) -> PagePool:
    return PagePool(4, 16, clock)


def test_life_of_a_decode_page(pool: PagePool) -> None:
    # 1. Two pages are promised.
    pages = pool.allocate(2, A, PageState.RESERVED)
    assert pool.num_free == 2
    # 2. The first bytes arrive.
    pool.move(pages, A, PageState.FILLING)
    # 3. The commit is verified.
    pool.move(pages, A, PageState.USED)
    assert pool.counts()[PageState.USED] == 2
    # 4. The sequence ends.
    pool.release(pages, A)
    assert_no_leaks(pool)


def test_life_of_a_prefill_page(pool: PagePool) -> None:
    # 1. The prompt starts.
    pages = pool.allocate(3, A, PageState.USED)
    # 2. It is computed; the pages are on their way.
    pool.move(pages, A, PageState.SENDING)
    # 3. A retry takes them over as they are.
    generations = [pool.generation(page) for page in pages]
    pool.rename_owner(pages, A, A2)
    assert [pool.generation(page) for page in pages] == generations
    assert pool.state(pages[0]) is PageState.SENDING
    # 4. Decode has acknowledged.
    pool.release(pages, A2)
    assert_no_leaks(pool)


def test_an_allocation_that_does_not_fit_takes_nothing(pool: PagePool) -> None:
    pool.allocate(3, A, PageState.USED)
    with pytest.raises(OutOfPages, match="2 pages were requested and 1 are free"):
        pool.allocate(2, B, PageState.USED)
    assert pool.num_free == 1
    pool.check()


def test_a_page_gets_a_new_generation_with_each_allocation(pool: PagePool) -> None:
    (page,) = pool.allocate(1, A, PageState.USED)
    first = pool.generation(page)
    pool.release((page,), A)
    pages = pool.allocate(4, B, PageState.USED)
    assert page in pages
    assert pool.generation(page) == first + 1


def test_reissuing_voids_what_was_promised(pool: PagePool) -> None:
    pages = pool.allocate(2, A, PageState.RESERVED)
    generations = [pool.generation(page) for page in pages]
    pool.move(pages, A, PageState.FILLING)
    pool.reissue(pages, A, A2)
    assert [pool.generation(page) for page in pages] == [generation + 1 for generation in generations]
    assert pool.counts()[PageState.RESERVED] == 2
    assert pool.owners(pages[0]) == (A2,)
    with pytest.raises(AssertionError, match="is not owned by a/0 attempt 1"):
        pool.release(pages, A)


def test_a_shared_page_is_free_only_when_every_claim_is_gone(pool: PagePool) -> None:
    pages = pool.allocate(1, A, PageState.USED)
    pool.adopt(pages, B)
    pool.adopt(pages, B)
    assert pool.owners(pages[0]) == (A, B, B)
    pool.release(pages, A)
    pool.release(pages, B)
    assert pool.state(pages[0]) is PageState.USED
    pool.release(pages, B)
    assert_no_leaks(pool)


def test_a_shared_page_cannot_be_sent_or_reissued(pool: PagePool) -> None:
    pages = pool.allocate(1, A, PageState.USED)
    pool.adopt(pages, B)
    with pytest.raises(AssertionError, match="not by a/0 attempt 1 alone"):
        pool.move(pages, A, PageState.SENDING)
    with pytest.raises(AssertionError, match="not by a/0 attempt 1 alone"):
        pool.reissue(pages, A, A2)


@pytest.mark.parametrize("state", [PageState.FREE, PageState.CACHED, PageState.FILLING, PageState.SENDING])
def test_a_page_begins_as_used_or_reserved(pool: PagePool, state: PageState) -> None:
    with pytest.raises(AssertionError, match="cannot begin as"):
        pool.allocate(1, A, state)


def test_a_move_that_the_life_of_a_page_does_not_know_changes_nothing(pool: PagePool) -> None:
    reserved = pool.allocate(1, A, PageState.RESERVED)
    with pytest.raises(AssertionError, match="cannot go from reserved to used"):
        pool.move(reserved, A, PageState.USED)
    with pytest.raises(AssertionError, match="only a used page can be shared"):
        pool.adopt(reserved, B)
    assert pool.state(reserved[0]) is PageState.RESERVED
    pool.check()


def test_a_second_release_is_a_bug_and_is_named(pool: PagePool) -> None:
    pages = pool.allocate(1, A, PageState.USED)
    pool.release(pages, A)
    with pytest.raises(AssertionError, match="page 0 is not owned by a/0 attempt 1"):
        pool.release(pages, A)
    assert_no_leaks(pool)


def test_the_snapshot_lists_what_is_not_free_with_its_age(pool: PagePool, clock: ManualClock) -> None:
    pages = pool.allocate(2, A, PageState.RESERVED)
    clock.advance(3.0)
    pool.move(pages[:1], A, PageState.FILLING)
    clock.advance(1.5)
    snapshot = pool.snapshot()
    assert snapshot.is_sum_ok
    assert snapshot.counts.keys() == set(PageState)
    assert [(record.page_id, record.state, record.age_s) for record in snapshot.pages] == [
        (PageId(0), PageState.FILLING, 1.5),
        (PageId(1), PageState.RESERVED, 4.5),
    ]
    assert snapshot.pages[0].owners == (A,)
    summary = pool.snapshot(is_summary=True)
    assert summary.pages == ()
    assert summary.counts == snapshot.counts


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda pool: pool._counts.update({PageState.USED: 5}), "the states sum to 7 of 4 pages"),
        (lambda pool: pool._owners[0].clear(), "page 0 is used and has no owner"),
        (lambda pool: pool._owners[3].append(B), "page 3 is free and owned by b/0 attempt 1"),
        (lambda pool: pool._free.pop(), "the free list holds 1 pages, 2 are counted as free"),
        (lambda pool: pool._states.__setitem__(0, PageState.SENDING), "2 pages are counted as used, 1 are"),
    ],
)
def test_check_names_what_is_wrong(pool: PagePool, break_it: object, named: str) -> None:
    pool.allocate(2, A, PageState.USED)
    pool.check()
    assert callable(break_it)
    break_it(pool)
    with pytest.raises(AssertionError, match=named):
        pool.check()
