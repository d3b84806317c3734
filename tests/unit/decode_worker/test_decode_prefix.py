"""The delta: what decode has cached is pinned by the ticket, not sent, and never written again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import PageId
from serving_core.page_state import PageOwner, PageState
from serving_core.transfer_ticket import TransferTicket
from tests.pages import assert_no_leaks
from tests.phases import (
    LAYOUT,
    LEASE_S,
    DecodeSide,
    PrefillSide,
    expected_tokens,
    make_commit,
    make_prompt,
    make_request,
    make_segment,
    next_token,
    prompt_segments,
)

PAGE = LAYOUT.page_size
TEXT = make_prompt(40)


def request_of(
    name: str, num_tokens: int, *, end: tuple[int, ...] = (), max_tokens: int = 5, salt: bytes = b""
) -> GenerateRequest:
    """A prompt of the text's first tokens and ``end``."""
    return make_request(name=name, prompt_token_ids=TEXT[:num_tokens] + end, max_tokens=max_tokens, cache_salt=salt)


def run(decode: DecodeSide, request: GenerateRequest) -> TransferTicket:
    """The sequence from start to end."""
    ticket = decode.begin(request)
    decode.run_out()
    return ticket


def answer_of(request: GenerateRequest) -> list[int]:
    return expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)


def pages_of(decode: DecodeSide, request: GenerateRequest, attempt: int = 1) -> list[PageId]:
    """Those that the sequence owns."""
    owner = PageOwner(key=request.key, attempt=attempt)
    return [record.page_id for record in decode.pool.snapshot().pages if owner in record.owners]


@pytest.fixture
def decode() -> DecodeSide:
    return DecodeSide(has_prefix_cache=True, num_pages=24)


@pytest.mark.parametrize("num_first", [1, 3, 4, 5, 8, 9, 12, 13])
@pytest.mark.parametrize("num_second", [1, 3, 4, 5, 8, 9, 12, 13])
def test_what_is_here_is_not_sent_again(decode: DecodeSide, num_first: int, num_second: int) -> None:
    first, second = request_of("first", num_first, max_tokens=1), request_of("second", num_second)
    run(decode, first)
    num_sent = decode.phase.counters.num_kv_bytes
    ticket = run(decode, second)
    num_cached = min(num_first // PAGE, (num_second - 1) // PAGE) * PAGE
    assert ticket.num_cached_tokens == num_cached
    num_pages = LAYOUT.num_pages_for(num_second) - num_cached // PAGE
    assert decode.phase.counters.num_kv_bytes - num_sent == num_pages * LAYOUT.page_bytes
    assert decode.token_ids(second.key) == answer_of(second)
    counters = decode.phase.counters
    assert (counters.num_prefix_queries, counters.num_prefix_hits) == (num_first + num_second, num_cached)
    assert_no_leaks(decode.pool)


@pytest.mark.parametrize(("num_answer", "num_cached"), [(2, 4), (3, 8), (8, 12), (10, 12), (11, 16)])
def test_the_next_turn_finds_prompt_and_answer_but_for_the_token_that_was_never_computed_with(
    decode: DecodeSide, num_answer: int, num_cached: int
) -> None:
    first = request_of("first", 6, max_tokens=num_answer)
    run(decode, first)
    answer = decode.token_ids(first.key)
    second = make_request(name="second", prompt_token_ids=(*first.prompt_token_ids, *answer, 1, 2, 3))
    ticket = run(decode, second)
    assert ticket.num_cached_tokens == num_cached
    assert decode.token_ids(second.key) == answer_of(second)
    assert_no_leaks(decode.pool)


def test_an_abort_within_a_replay_keeps_what_was_replayed(decode: DecodeSide) -> None:
    request = request_of("a", 4, max_tokens=20)
    log = tuple(answer_of(request)[:14])
    again = replace(request, output_token_ids=log)
    decode.begin(again)
    decode.step()  # five of them
    decode.phase.abort(again.key, 1)
    prompt = (*request.prompt_token_ids, *log, 1, 2)
    assert decode.reserve(make_request(name="b", prompt_token_ids=prompt)).num_cached_tokens == 8


def test_nothing_is_known_before_the_commit_is_verified(decode: DecodeSide) -> None:
    first = request_of("first", 12)
    ticket = decode.reserve(first)
    segments = prompt_segments(ticket, first)
    # 1. Every byte has come, but nobody has committed.
    decode.phase.accept(segments)
    assert decode.reserve(request_of("second", 12)).num_cached_tokens == 0
    # 2. A commit that is refused changes nothing.
    with pytest.raises(Refused):
        decode.phase.commit(replace(make_commit(ticket, 5), num_bytes_sent=1))
    assert decode.reserve(request_of("third", 12)).num_cached_tokens == 0
    # 3. With the commit the next one begins with it, while the first goes on.
    decode.phase.commit(make_commit(ticket, next_token(first.prompt_token_ids)))
    assert decode.reserve(request_of("fourth", 12)).num_cached_tokens == 8


def test_an_uncommitted_sequence_leaves_nothing_but_what_it_had_pinned(decode: DecodeSide) -> None:
    run(decode, request_of("first", 8, max_tokens=1))
    second = request_of("second", 20)
    ticket = decode.reserve(second)
    decode.phase.accept(prompt_segments(ticket, second))
    decode.phase.abort(second.key, 1)
    assert decode.pool.counts()[PageState.CACHED] == 2
    assert decode.reserve(request_of("third", 20)).num_cached_tokens == 8


def test_pinned_pages_are_owned_from_issue_to_release_and_never_given_away() -> None:
    decode = DecodeSide(has_prefix_cache=True, num_pages=6)
    first = request_of("first", 16, max_tokens=1)
    run(decode, first)
    # 1. The ticket names four pages; with a fresh one the second holds five of six, and may not grow.
    second = request_of("second", 16, end=(1,), max_tokens=3)
    ticket = decode.reserve(second)
    assert ticket.num_cached_tokens == 16
    pinned = pages_of(decode, second)[:4]
    # 2. Somebody takes all that is left: the pinned pages stay.
    decode.reserve(make_request(3, name="other", max_tokens=1))
    assert decode.pool.num_available == 0
    assert all(decode.pool.state(page_id) is PageState.USED for page_id in pinned)
    # 3. Nobody can write into them.
    with pytest.raises(Refused) as refused:
        decode.phase.accept([make_segment(ticket, 0, bytes(LAYOUT.page_bytes))])
    assert refused.value.code is RefusalCode.MALFORMED
    decode.phase.accept(prompt_segments(ticket, second))
    decode.phase.commit(make_commit(ticket, next_token(second.prompt_token_ids)))
    decode.phase.abort(make_request(name="other").key, 1)
    decode.run_out()
    assert decode.token_ids(second.key) == answer_of(second)
    assert_no_leaks(decode.pool)


def test_another_salt_begins_anew_and_a_retry_cannot_change_it(decode: DecodeSide) -> None:
    run(decode, request_of("first", 12))
    secret = request_of("secret", 12, salt=b"tenant")
    assert run(decode, secret).num_cached_tokens == 0
    assert run(decode, request_of("again", 12, salt=b"tenant")).num_cached_tokens == 8
    held = request_of("held", 12, salt=b"tenant")
    decode.reserve(held)
    with pytest.raises(Refused) as refused:
        decode.reserve(replace(held, cache_salt=b""), 2)
    assert refused.value.code is RefusalCode.MALFORMED


@pytest.mark.parametrize("num_prompt_tokens", [7, 8, 9, 12])
def test_a_retry_after_the_commit_keeps_the_prompt_and_shares_it_on(decode: DecodeSide, num_prompt_tokens: int) -> None:
    # 1. A sequence decodes, and another begins with its prompt.
    request = request_of("a", num_prompt_tokens, max_tokens=9)
    decode.begin(request)
    for _ in range(4):
        decode.step()
    sharing = request_of("b", num_prompt_tokens, end=(3, 1), max_tokens=9)
    decode.begin(sharing)
    # 2. Its router comes again with the log: prefill has to send the last page only.
    log = tuple(decode.token_ids(request.key))
    again = replace(request, output_token_ids=log)
    ticket = decode.reserve(again, 2)
    num_kept = (num_prompt_tokens - 1) // PAGE
    assert ticket.first_page == num_kept
    assert len(pages_of(decode, request, attempt=2)) == LAYOUT.num_pages_for(num_prompt_tokens + 4)
    assert pages_of(decode, request, attempt=1) == []
    # 3. It goes on as if nothing had been, and so does the other.
    decode.phase.accept(prompt_segments(ticket, again))
    decode.phase.commit(make_commit(ticket, log[0]))
    decode.run_out()
    assert log + tuple(decode.token_ids(request.key, 2)[1:]) == tuple(answer_of(request))
    assert decode.token_ids(sharing.key) == answer_of(sharing)
    assert_no_leaks(decode.pool)


def test_a_retry_before_the_commit_keeps_what_was_pinned(decode: DecodeSide) -> None:
    run(decode, request_of("first", 8, max_tokens=1))
    request = request_of("a", 16)
    old = decode.reserve(request)
    decode.phase.accept(prompt_segments(old, request)[:1])
    new = decode.reserve(request, 2)
    assert (old.num_cached_tokens, new.num_cached_tokens) == (8, 8)
    with pytest.raises(Refused):
        decode.phase.accept(prompt_segments(old, request)[1:])
    decode.phase.accept(prompt_segments(new, request))
    decode.phase.commit(make_commit(new, next_token(request.prompt_token_ids)))
    decode.run_out()
    assert decode.token_ids(request.key) == answer_of(request)


def test_shared_pages_take_no_room_twice() -> None:
    decode = DecodeSide(has_prefix_cache=True, num_pages=8)
    decode.begin(request_of("first", 17, max_tokens=3))  # five pages, and it may not grow
    assert decode.pool.num_available == 3
    second = request_of("second", 16, end=(9,), max_tokens=3)  # five too, but for the four that it shares
    assert decode.reserve(second).num_cached_tokens == 16
    assert decode.pool.num_available == 2
    assert decode.ask(make_request(16, name="other", max_tokens=1)) == []


def test_cached_pages_are_not_counted_as_room_twice() -> None:
    """As what a prompt begins with and as what the rest of it may take."""
    decode = DecodeSide(has_prefix_cache=True, num_pages=6)
    run(decode, request_of("first", 16, max_tokens=1))
    other = make_request(7, name="other", max_tokens=1)
    decode.reserve(other)
    assert (decode.pool.num_available, decode.pool.counts()[PageState.CACHED]) == (4, 4)
    second = decode.ask(request_of("second", 16, end=(1,), max_tokens=3))  # the four, and one more
    assert second == []
    decode.phase.abort(other.key, 1)
    decode.step()
    (ticket,) = second
    assert isinstance(ticket, TransferTicket)
    assert ticket.num_cached_tokens == 16


def test_an_evicted_sequence_comes_back_to_its_pages() -> None:
    # 1. Two sequences grow until the younger one has to go.
    decode = DecodeSide(has_prefix_cache=True, num_pages=8)
    old, young = request_of("old", 3, max_tokens=20), make_request(9, name="young", max_tokens=12)
    decode.begin(old)
    decode.begin(young)
    while not decode.sink.evictions:
        assert decode.step() is not None
    log = tuple(decode.token_ids(young.key))
    # 2. The older one ends; what it did not need of the younger one's pages is still there.
    decode.run_out()
    assert decode.token_ids(old.key) == answer_of(old)
    # 3. The younger one comes back with its log.
    back = replace(young, output_token_ids=log)
    ticket = decode.reserve(back, 2, num_evictions=1)
    decode.phase.accept(prompt_segments(ticket, back))
    decode.phase.commit(make_commit(ticket, log[0]))
    decode.run_out()
    assert log + tuple(decode.token_ids(young.key, 2)[1:]) == tuple(answer_of(young))
    assert_no_leaks(decode.pool)


def test_a_lease_that_ends_leaves_full_pages_cached(decode: DecodeSide) -> None:
    request = request_of("a", 9, max_tokens=20)
    decode.begin(request)
    for _ in range(4):
        decode.step()
    decode.clock.advance(LEASE_S)
    decode.run_out()
    assert decode.sink.failures
    assert decode.pool.counts()[PageState.CACHED] == 3  # of 9 + 4 tokens
    assert_no_leaks(decode.pool)


def test_pages_of_a_row_that_failed_are_not_begun_with(decode: DecodeSide) -> None:
    run(decode, request_of("first", 12))
    failing = request_of("failing", 12)
    decode.runner.failing.add(failing.key)
    run(decode, failing)
    assert decode.sink.failures
    assert decode.reserve(request_of("again", 12)).num_cached_tokens == 0


def test_without_a_prefix_cache_every_ticket_begins_at_the_first_page() -> None:
    decode = DecodeSide()
    for name in "ab":
        assert run(decode, request_of(name, 12)).num_cached_tokens == 0
    assert decode.pool.counts()[PageState.FREE] == 16
    assert decode.phase.counters.num_prefix_queries == 0


def test_a_commit_that_claims_the_whole_prompt_as_cached_is_malformed(decode: DecodeSide) -> None:
    request = request_of("a", 6)
    ticket = decode.reserve(request)
    decode.phase.accept(prompt_segments(ticket, request))
    with pytest.raises(Refused, match="6 cached tokens, but the prompt has 6") as refused:
        decode.phase.commit(make_commit(ticket, 5, num_cached_tokens=6))
    assert refused.value.code is RefusalCode.MALFORMED
    decode.phase.commit(make_commit(ticket, 5, num_cached_tokens=4))
    decode.step()
    assert [event.num_cached_tokens for event in decode.sink.tokens_of(request.key)] == [4, 0]


def test_the_local_path_computes_what_is_not_here_and_writes_nothing_else(decode: DecodeSide) -> None:
    prefill = PrefillSide(beside=decode, has_prefix_cache=True, max_num_batched_tokens=5)
    # 1. A prompt on the local path, its tokens in pages that decode lends.
    first = request_of("first", 10, max_tokens=7)
    prefill.admit_local(first, decode.reserve(first))
    prefill.run_out()
    decode.run_out()
    # 2. The next turn: prompt and answer are here.
    second = make_request(name="second", prompt_token_ids=(*first.prompt_token_ids, *answer_of(first), 5))
    ticket = decode.reserve(second)
    assert ticket.num_cached_tokens == 16
    prefill.admit_local(second, ticket)
    prefill.run_out()
    (plan,) = prefill.runner.plans[-1:]
    assert [(row.start_position, len(row.token_ids)) for row in plan.rows] == [(16, 2)]
    (event,) = prefill.sink.tokens_of(second.key)
    assert event.num_cached_tokens == 16
    decode.run_out()
    assert decode.token_ids(second.key) == answer_of(second)
    assert decode.sink.tokens_of(second.key)[0].num_cached_tokens == 16
    # 3. Decode alone counted, since it alone looked.
    assert prefill.phase.counters.num_prefix_queries == 0
    assert_no_leaks(decode.pool)


def test_both_phases_on_one_pool_share_what_either_has(decode: DecodeSide) -> None:
    """A prompt that goes elsewhere begins with what decode has kept here, and is kept for it."""
    prefill = PrefillSide(beside=decode, has_prefix_cache=True)
    run(decode, request_of("first", 12, max_tokens=1))
    elsewhere = request_of("elsewhere", 20)
    handoff = prefill.admit(elsewhere, DecodeSide(name="decode-1", incarnation="d1").reserve(elsewhere))
    prefill.run_out()
    (event,) = prefill.sink.tokens_of(elsewhere.key)
    assert (event.token_id, event.num_cached_tokens) == (next_token(elsewhere.prompt_token_ids), 12)
    prefill.end_handoff(handoff, None)
    assert decode.reserve(request_of("second", 21), 1).num_cached_tokens == 20
