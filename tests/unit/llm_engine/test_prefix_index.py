from __future__ import annotations

import pytest

from llm_engine.page_hash import PageHash, page_hashes
from llm_engine.prefix_index import PrefixIndex
from serving_core.ids import PageId


def pages(*numbers: int) -> tuple[PageId, ...]:
    return tuple(map(PageId, numbers))


def hashes(text: str) -> tuple[PageHash, ...]:
    """Of pages of one letter each."""
    return page_hashes([ord(letter) for letter in text], page_size=1, salt=b"")


@pytest.fixture
def index() -> PrefixIndex:
    """``abc`` in the pages 0, 1, 2 and ``abd`` with its end in page 3."""
    made = PrefixIndex()
    made.add(hashes("abc"), pages(0, 1, 2))
    made.add(hashes("abd"), pages(0, 1, 3))
    return made


def test_the_longest_known_beginning_is_found(index: PrefixIndex) -> None:
    assert index.find(hashes("abce")) == pages(0, 1, 2)
    assert index.find(hashes("abd")) == pages(0, 1, 3)
    assert index.find(hashes("aXc")) == pages(0)
    assert index.find(hashes("bc")) == ()
    index.check(())


def test_a_double_gets_no_entry_and_what_follows_it_does(index: PrefixIndex) -> None:
    index.add(hashes("abcf"), pages(7, 8, 9, 4))
    assert index.find(hashes("abcf")) == pages(0, 1, 2, 4)
    assert [PageId(number) in index for number in (7, 8, 9, 4)] == [False, False, False, True]
    index.check(())


def test_what_comes_after_a_forgotten_page_is_forgotten_too(index: PrefixIndex) -> None:
    assert set(index.forget(PageId(1))) == set(pages(1, 2, 3))
    assert index.find(hashes("abc")) == pages(0)
    assert index.forget(PageId(1)) == []
    index.check(())
    index.add(hashes("abc"), pages(0, 5, 2))
    assert index.find(hashes("abc")) == pages(0, 5, 2)
    index.check(())


def test_the_page_idle_for_longest_goes_first(index: PrefixIndex) -> None:
    for number in (2, 3, 1, 0):
        index.retire(PageId(number))
    index.check(pages(0, 1, 2, 3))
    for number in (2, 1, 0):  # somebody owned "abc" once more
        index.revive(PageId(number))
    for number in (2, 1, 0):
        index.retire(PageId(number))
    assert [index.evict_oldest() for _ in range(2)] == [[PageId(3)], [PageId(2)]]
    assert index.find(hashes("abc")) == pages(0, 1)


def test_leaves_go_before_the_pages_they_come_after(index: PrefixIndex) -> None:
    for number in (3, 2, 1, 0):
        index.retire(PageId(number))
    evicted = []
    while len(index):
        evicted += index.evict_oldest()
        index.check(pages(*({0, 1, 2, 3} - set(evicted))))
    assert evicted == list(pages(3, 2, 1, 0))


def test_an_idle_page_whose_leaf_is_in_use_takes_the_entry_of_the_leaf_along() -> None:
    """Two computed the same first page at once, and the one whose page is in the index ended first."""
    index = PrefixIndex()
    index.add(hashes("a"), pages(0))
    index.add(hashes("ab"), pages(5, 1))
    index.retire(PageId(0))
    assert index.evict_oldest() == list(pages(0, 1))
    index.check(())
    assert len(index) == 0


def test_one_page_cannot_hold_two_things(index: PrefixIndex) -> None:
    with pytest.raises(AssertionError, match="page 2 holds something else"):
        index.add(hashes("xy"), pages(2, 9))
