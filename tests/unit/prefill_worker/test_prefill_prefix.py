"""Prompts that begin alike: what is not computed again, who owns it, and what stays when they end."""

from __future__ import annotations

import pytest

from serving_core.errors import WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.page_state import PageState
from serving_core.transfer_ticket import TransferTicket
from tests.pages import assert_no_leaks
from tests.phases import LAYOUT, MAX_MODEL_LEN, DecodeSide, FakeHandoff, PrefillSide, make_prompt, make_request, next_token

PAGE = LAYOUT.page_size
TEXT = make_prompt(40)


def request_of(name: str, num_tokens: int, *, end: tuple[int, ...] = (), salt: bytes = b"") -> GenerateRequest:
    """A prompt of the text's first tokens and ``end``."""
    return make_request(name=name, prompt_token_ids=TEXT[:num_tokens] + end, cache_salt=salt)


def ticket_of(request: GenerateRequest, attempt: int = 1) -> TransferTicket:
    return DecodeSide(num_pages=64).reserve(request, attempt)


def start(prefill: PrefillSide, request: GenerateRequest) -> FakeHandoff:
    return prefill.admit(request, ticket_of(request))


def run(prefill: PrefillSide, request: GenerateRequest) -> FakeHandoff:
    """The prompt from start to end, acknowledged."""
    handoff = start(prefill, request)
    prefill.run_out()
    prefill.end_handoff(handoff, None)
    return handoff


def num_computed(prefill: PrefillSide, request: GenerateRequest) -> int:
    rows = [row for plan in prefill.runner.plans for row in plan.rows if row.key == request.key]
    return sum(len(row.token_ids) for row in rows)


@pytest.fixture
def prefill() -> PrefillSide:
    return PrefillSide(has_prefix_cache=True, num_pages=16, max_num_batched_tokens=8)


@pytest.mark.parametrize("num_first", [1, 3, 4, 5, 8, 9, 12, 13])
@pytest.mark.parametrize("num_second", [1, 3, 4, 5, 8, 9, 12, 13])
def test_full_pages_are_computed_once_and_the_last_token_always(prefill: PrefillSide, num_first: int, num_second: int) -> None:
    run(prefill, request_of("first", num_first))
    second = request_of("second", num_second)
    handoff = run(prefill, second)
    num_cached = min(num_first // PAGE, (num_second - 1) // PAGE) * PAGE
    assert num_computed(prefill, second) == num_second - num_cached
    (event,) = prefill.sink.tokens_of(second.key)
    assert (event.token_id, event.num_cached_tokens) == (next_token(second.prompt_token_ids), num_cached)
    assert handoff.commit is not None
    assert handoff.commit.num_cached_tokens == num_cached
    assert [ordinal for ordinal, _ in handoff.pages] == list(range(LAYOUT.num_pages_for(num_second)))
    counters = prefill.phase.counters
    assert (counters.num_prefix_queries, counters.num_prefix_hits) == (num_first + num_second, num_cached)
    assert counters.num_prompt_tokens == num_first + num_second - num_cached
    assert_no_leaks(prefill.pool)


def test_without_a_prefix_cache_nothing_stays() -> None:
    prefill = PrefillSide()
    for name in "ab":
        run(prefill, request_of(name, 9))
    assert prefill.pool.counts()[PageState.FREE] == 16
    assert prefill.phase.counters.num_prefix_queries == 0
    assert num_computed(prefill, request_of("b", 9)) == 9


def test_another_salt_or_another_token_begins_anew(prefill: PrefillSide) -> None:
    run(prefill, request_of("first", 12))
    for name, request in (
        ("salt", request_of("salt", 12, salt=b"tenant")),
        ("token", make_request(name="token", prompt_token_ids=(0, *TEXT[1:12]))),
    ):
        run(prefill, request)
        assert num_computed(prefill, request) == 12, name
    again = request_of("again", 12, salt=b"tenant")
    run(prefill, again)
    assert num_computed(prefill, again) == 4


def test_pages_are_shared_with_a_prompt_that_is_still_computed_or_sent(prefill: PrefillSide) -> None:
    # 1. The first is half computed when the second comes; it begins with what is full.
    first, second = request_of("first", 20), request_of("second", 12, end=(7, 8))
    first_handoff = start(prefill, first)
    prefill.step()
    second_handoff = start(prefill, second)
    prefill.step()
    prefill.step()
    assert prefill.sink.tokens_of(first.key)
    prefill.run_out()
    assert num_computed(prefill, second) == 14 - 12
    shared = [page_id for _, page_id in first_handoff.pages][:3]
    assert [page_id for _, page_id in second_handoff.pages][:3] == shared
    # 2. The first is acknowledged, the second sends on.
    assert all(prefill.pool.state(page_id) is PageState.SENDING for page_id in shared)
    prefill.end_handoff(first_handoff, None)
    assert all(prefill.pool.state(page_id) is PageState.SENDING for page_id in shared)
    assert prefill.pool.counts()[PageState.CACHED] == 2
    prefill.end_handoff(second_handoff, None)
    assert prefill.pool.counts() == {**dict.fromkeys(PageState, 0), PageState.CACHED: 5, PageState.FREE: 11}
    assert_no_leaks(prefill.pool)


def test_an_aborted_prompt_leaves_the_pages_that_it_completed(prefill: PrefillSide) -> None:
    first = request_of("first", 20)
    start(prefill, first)
    prefill.step()
    prefill.phase.abort(first.key, 1)
    prefill.close_cancelled()
    assert prefill.pool.counts()[PageState.CACHED] == 2
    again = request_of("again", 20)
    run(prefill, again)
    assert num_computed(prefill, again) == 12


def test_cached_pages_make_room_and_those_in_use_do_not() -> None:
    prefill = PrefillSide(has_prefix_cache=True, num_pages=5)
    run(prefill, request_of("first", 20))
    assert prefill.pool.counts()[PageState.CACHED] == 5
    # 1. A prompt that goes on from the cached ones needs no more than the pool has, and gives up the text's end.
    second = request_of("second", 8, end=(1, 2, 3, 4, 5))
    handoff = start(prefill, second)
    prefill.run_out()
    assert num_computed(prefill, second) == 5
    assert prefill.pool.num_available == 1
    # 2. One that shares two of its pages with the second needs but one of its own.
    third = request_of("third", 8, end=(9,))
    third_handoff = start(prefill, third)
    prefill.run_out()
    assert num_computed(prefill, third) == 1
    # 3. One with nothing in common waits until a page is given back.
    other = make_request(2, name="other")
    start(prefill, other)
    assert prefill.step() is None
    assert prefill.phase.status().num_waiting == 1
    prefill.end_handoff(third_handoff, None)
    prefill.run_out()
    assert prefill.sink.tokens_of(other.key)
    prefill.end_handoff(handoff, None)
    prefill.pool.check()


def test_cached_pages_are_not_counted_as_room_twice() -> None:
    """As what a prompt begins with and as what the rest of it may take."""
    prefill = PrefillSide(has_prefix_cache=True, num_pages=6)
    run(prefill, request_of("first", 20))
    other = start(prefill, make_request(3, name="other"))
    prefill.run_out()
    assert (prefill.pool.num_available, prefill.pool.counts()[PageState.CACHED]) == (5, 5)
    second = request_of("second", 20, end=(1,))  # the five, and one more
    handoff = start(prefill, second)
    assert prefill.step() is None
    prefill.end_handoff(other, None)
    prefill.run_out()
    assert num_computed(prefill, second) == 1
    prefill.end_handoff(handoff, None)
    assert_no_leaks(prefill.pool)


def test_what_the_prompts_of_a_step_have_in_the_cache_before_it_is_bounded() -> None:
    """They share the pages, but each attends to all of them: together at most a window's worth."""
    prefill = PrefillSide(has_prefix_cache=True, num_pages=32, max_num_batched_tokens=8)
    run(prefill, request_of("first", 20))
    requests = [request_of(f"r{number}", 20, end=(number,)) for number in range(7)]
    handoffs = [start(prefill, request) for request in requests]
    prefill.runner.plans.clear()
    prefill.run_out()
    steps = [[row.start_position for row in plan.rows] for plan in prefill.runner.plans]
    assert steps == [[20] * 3, [20] * 3, [20]]
    assert MAX_MODEL_LEN == 64
    for request, handoff in zip(requests, handoffs, strict=True):
        prefill.end_handoff(handoff, None)
        assert prefill.token_ids(request.key) == [next_token(request.prompt_token_ids)]
    assert_no_leaks(prefill.pool)


def test_a_retry_tells_and_sends_the_same_again(prefill: PrefillSide) -> None:
    run(prefill, request_of("first", 12))
    second = request_of("second", 12, end=(5,))
    handoff = start(prefill, second)
    prefill.run_out()
    prefill.end_handoff(handoff, WorkerLost("The way is lost."))
    retry = prefill.admit(second, ticket_of(second, 2))
    assert len(retry.pages) == 4
    assert retry.commit is not None
    assert retry.commit.num_cached_tokens == 12
    prefill.end_handoff(retry, None)
    assert_no_leaks(prefill.pool)


def test_pages_of_a_row_that_failed_are_not_begun_with(prefill: PrefillSide) -> None:
    run(prefill, request_of("first", 12))
    failing = request_of("failing", 12, end=(5,))
    prefill.runner.failing.add(failing.key)
    start(prefill, failing)
    prefill.run_out()
    prefill.close_cancelled()
    assert prefill.pool.counts()[PageState.FREE] == 16
    again = request_of("again", 12)
    run(prefill, again)
    assert num_computed(prefill, again) == 12


def test_cached_pages_are_offered_before_the_rest_is_computed(prefill: PrefillSide) -> None:
    run(prefill, request_of("first", 16))
    second = request_of("second", 16, end=TEXT[:16])
    handoff = start(prefill, second)
    offered: list[int] = []
    prefill.runner.before_run = lambda plan: offered.append(len(handoff.pages))
    prefill.run_out()
    assert offered == [4, 6]


@pytest.mark.parametrize("num_equal", [2, 5])
def test_equal_prompts_that_come_together_are_computed_once(prefill: PrefillSide, num_equal: int) -> None:
    requests = [request_of(f"r{number}", 13) for number in range(num_equal)]
    handoffs = [start(prefill, request) for request in requests]
    prefill.run_out()
    assert [num_computed(prefill, request) for request in requests] == [13] + [1] * (num_equal - 1)
    for request, handoff in zip(requests, handoffs, strict=True):
        assert prefill.token_ids(request.key) == [next_token(request.prompt_token_ids)]
        prefill.end_handoff(handoff, None)
    assert_no_leaks(prefill.pool)


def test_who_waits_for_what_is_coming_holds_up_nobody() -> None:
    prefill = PrefillSide(has_prefix_cache=True, num_pages=32, max_num_batched_tokens=24)
    first, second = request_of("first", 20), request_of("second", 8, end=(5, 6, 7, 8, 9))
    other = make_request(3, name="other")
    for request in (first, second, other):
        start(prefill, request)
    plan = prefill.step()
    assert plan is not None
    assert [(row.key, len(row.token_ids)) for row in plan.rows] == [(first.key, 20), (other.key, 3)]
    prefill.run_out()
    assert num_computed(prefill, second) == 5


def test_who_waited_for_a_prompt_that_ends_early_computes_the_rest(prefill: PrefillSide) -> None:
    first, second = request_of("first", 20), request_of("second", 20)
    start(prefill, first)
    start(prefill, second)
    prefill.step()
    prefill.phase.abort(first.key, 1)
    prefill.close_cancelled()
    prefill.run_out()
    assert num_computed(prefill, second) == 12
    # a row that failed leaves nothing to begin with
    third, fourth = (make_request(20, name=name, prompt_token_ids=make_prompt(20, first=300)) for name in ("third", "fourth"))
    prefill.runner.failing.add(third.key)
    start(prefill, third)
    start(prefill, fourth)
    prefill.run_out()
    assert num_computed(prefill, fourth) == 20


def test_nobody_waits_for_a_page_that_was_given_up() -> None:
    """One that was computed and is in no index any more does not come again."""
    prefill = PrefillSide(has_prefix_cache=True, num_pages=32, max_num_batched_tokens=24)
    first, second = request_of("first", 40), request_of("second", 20)
    handoff = start(prefill, first)
    prefill.step()
    prefill.pool.forget([page_id for _, page_id in handoff.pages])
    start(prefill, second)
    plan = prefill.step()
    assert plan is not None
    assert [(row.key, row.start_position) for row in plan.rows] == [(first.key, 24), (second.key, 0)]
