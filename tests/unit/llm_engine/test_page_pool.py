from __future__ import annotations

import pytest

from llm_engine.page_hash import page_hashes
from llm_engine.page_pool import PagePool
from serving_core.clock import ManualClock
from serving_core.errors import OutOfPages
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.page_state import PageOwner, PageState
from tests.pages import assert_no_leaks

A = PageOwner(key=SequenceKey(RequestId("a")), attempt=1)
A2 = PageOwner(key=SequenceKey(RequestId("a")), attempt=2)
B = PageOwner(key=SequenceKey(RequestId("b")), attempt=1)
HASHES = page_hashes(range(3), page_size=1, salt=b"")
OTHER_HASHES = page_hashes(range(3), page_size=1, salt=b"other")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def pool(clock: ManualClock) -> PagePool:
    return PagePool(4, 16, clock)


def test_life_of_a_decode_page(pool: PagePool) -> None:
    # 1. Two pages are promised.
    pages = pool.allocate(2, A, PageState.RESERVED)
    assert pool.num_available == 2
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
    pool.send(pages, A)
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
    assert pool.num_available == 1
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


def test_a_shared_page_cannot_be_reissued(pool: PagePool) -> None:
    pages = pool.allocate(1, A, PageState.USED)
    pool.adopt(pages, B)
    with pytest.raises(AssertionError, match="not by a/0 attempt 1 alone"):
        pool.reissue(pages, A, A2)


def test_a_shared_page_is_sending_while_any_of_its_owners_sends_it(pool: PagePool) -> None:
    pages = pool.allocate(1, A, PageState.USED)
    # 1. A sends it, and B begins with it meanwhile.
    pool.send(pages, A)
    pool.adopt(pages, B)
    # 2. B sends it as well; a retry of A goes on sending.
    pool.send(pages, B)
    pool.rename_owner(pages, A, A2)
    pool.check()
    # 3. B ends first: A still sends.
    pool.release(pages, B)
    assert pool.state(pages[0]) is PageState.SENDING
    # 4. B2 shares it without sending, and A ends.
    pool.adopt(pages, B)
    pool.release(pages, A2)
    assert pool.state(pages[0]) is PageState.USED
    pool.check()
    pool.release(pages, B)
    assert_no_leaks(pool)


def test_life_of_a_cached_page(pool: PagePool) -> None:
    # 1. Three pages are computed, of which two are full.
    pages = pool.allocate(3, A, PageState.USED)
    pool.publish(HASHES[:2], pages[:2], A)
    assert pool.find(HASHES) == pages[:2]
    # 2. Nobody owns them any more: the full ones stay, and are as good as free.
    pool.release(pages, A)
    assert (pool.counts()[PageState.CACHED], pool.counts()[PageState.FREE], pool.num_available) == (2, 2, 4)
    assert [record.owners for record in pool.snapshot().pages] == [(), ()]
    assert_no_leaks(pool)
    # 3. Another begins with them, as they are.
    generations = [pool.generation(page) for page in pages[:2]]
    assert pool.num_to_take(3, pages[:2]) == 3
    pool.adopt(pages[:2], B)
    assert [pool.generation(page) for page in pages[:2]] == generations
    assert pool.counts()[PageState.USED] == 2
    # 4. A third one shares them, which takes no room.
    assert pool.num_to_take(3, pages[:2]) == 1
    pool.adopt(pages[:2], A2)
    pool.release(pages[:2], B)
    assert pool.counts()[PageState.USED] == 2
    pool.release(pages[:2], A2)
    assert pool.counts()[PageState.CACHED] == 2
    assert_no_leaks(pool)


def test_free_pages_are_taken_before_cached_ones_and_the_ends_of_texts_before_their_beginnings(pool: PagePool) -> None:
    pages = pool.allocate(3, A, PageState.USED)
    pool.publish(HASHES, pages, A)
    pool.release(pages, A)
    for num_left in (3, 2, 1, 0):
        (taken,) = pool.allocate(1, B, PageState.RESERVED)
        assert pool.find(HASHES) == pages[:num_left]
        assert taken not in pages[:num_left]
        pool.check()
    with pytest.raises(OutOfPages, match="1 pages were requested and 0 are free"):
        pool.allocate(1, B, PageState.RESERVED)


def test_what_was_used_least_recently_is_given_up_first(pool: PagePool) -> None:
    pages = pool.allocate(2, A, PageState.USED)
    pool.publish(HASHES[:1], pages[:1], A)
    pool.publish(OTHER_HASHES[:1], pages[1:], A)
    pool.release(pages, A)
    pool.adopt(pages[1:], B)
    pool.release(pages[1:], B)  # the first one is the older one now, though given back after it before
    pool.allocate(3, B, PageState.USED)
    assert (pool.find(HASHES), pool.find(OTHER_HASHES)) == ((), pages[1:])


def test_a_double_is_free_when_it_is_given_back(pool: PagePool) -> None:
    first = pool.allocate(1, A, PageState.USED)
    second = pool.allocate(1, B, PageState.USED)
    pool.publish(HASHES[:1], first, A)
    pool.publish(HASHES[:1], second, B)
    pool.release(second, B)
    assert pool.state(second[0]) is PageState.FREE
    pool.release(first, A)
    assert pool.state(first[0]) is PageState.CACHED
    assert_no_leaks(pool)


def test_forgotten_pages_are_free_as_soon_as_nobody_owns_them(pool: PagePool) -> None:
    pages = pool.allocate(3, A, PageState.USED)
    pool.publish(HASHES, pages, A)
    pool.adopt(pages[:1], B)
    pool.release(pages, A)
    pool.forget(pages)
    assert pool.find(HASHES) == ()
    assert (pool.counts()[PageState.USED], pool.counts()[PageState.FREE]) == (1, 3)
    pool.release(pages[:1], B)
    assert pool.num_available == pool.counts()[PageState.FREE] == 4
    assert_no_leaks(pool)


def test_what_is_not_trusted_is_not_published_again_by_another_owner(pool: PagePool) -> None:
    pages = pool.allocate(2, A, PageState.USED)
    pool.publish(HASHES[:2], pages, A)
    pool.adopt(pages[:1], B)
    pool.release(pages, A)
    pool.forget(pages)
    other = pool.allocate(1, B, PageState.USED)
    pool.publish(HASHES[:2], pages[:1] + other, B)
    assert pool.find(HASHES) == ()
    pool.release(pages[:1] + other, B)
    anew = pool.allocate(4, A, PageState.USED)
    pool.publish(HASHES, anew[:3], A)
    assert pool.find(HASHES) == anew[:3]
    pool.release(anew, A)
    assert_no_leaks(pool)


def test_what_is_not_complete_or_not_owned_is_not_published_and_what_is_published_is_not_written_again(pool: PagePool) -> None:
    reserved = pool.allocate(1, A, PageState.RESERVED)
    with pytest.raises(AssertionError, match="is reserved, only a complete page can be published"):
        pool.publish(HASHES[:1], reserved, A)
    with pytest.raises(AssertionError, match="is reserved, only a complete page can be sent"):
        pool.send(reserved, A)
    used = pool.allocate(1, A, PageState.USED)
    with pytest.raises(AssertionError, match="is not owned by b/0 attempt 1"):
        pool.publish(HASHES[:1], used, B)
    pool.publish(HASHES[:1], used, A)
    with pytest.raises(AssertionError, match="is in the prefix index"):
        pool.reissue(used, A, A2)
    pool.check()


@pytest.mark.parametrize("state", [PageState.FREE, PageState.CACHED, PageState.FILLING, PageState.SENDING])
def test_a_page_begins_as_used_or_reserved(pool: PagePool, state: PageState) -> None:
    with pytest.raises(AssertionError, match="cannot begin as"):
        pool.allocate(1, A, state)


def test_a_move_that_the_life_of_a_page_does_not_know_changes_nothing(pool: PagePool) -> None:
    reserved = pool.allocate(1, A, PageState.RESERVED)
    with pytest.raises(AssertionError, match="cannot go from reserved to used"):
        pool.move(reserved, A, PageState.USED)
    with pytest.raises(AssertionError, match="only a complete page can be shared"):
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
        (lambda pool: pool._senders.update({1: {A}}), "page 1 is used with 1 senders"),
        (lambda pool: pool._senders.update({1: {B}}), "page 1 is sent by b/0 attempt 1 and owned by a/0 attempt 1"),
        (lambda pool: pool._index._idle.update({0: None}), "1 pages are idle in the index, 0 are in the pool"),
    ],
)
def test_check_names_what_is_wrong(pool: PagePool, break_it: object, named: str) -> None:
    pool.allocate(2, A, PageState.USED)
    pool.check()
    assert callable(break_it)
    break_it(pool)
    with pytest.raises(AssertionError, match=named):
        pool.check()
