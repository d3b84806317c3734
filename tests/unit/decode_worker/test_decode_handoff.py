"""Segments and commits: the fence, what is verified, and what a repeated message gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from serving_core.errors import RefusalCode, Refused
from serving_core.ids import ReservationId
from serving_core.page_state import PageState
from serving_core.token_event import TokenLogprobs
from tests.pages import assert_no_leaks
from tests.phases import (
    LAYOUT,
    LEASE_S,
    NUM_TOKENS,
    DecodeSide,
    expected_tokens,
    make_commit,
    make_request,
    make_segment,
    next_token,
    prompt_segments,
)

REQUEST = make_request(6, max_tokens=5)
TOKEN = next_token(REQUEST.prompt_token_ids)


def code_of(call: Callable[[], object]) -> RefusalCode:
    with pytest.raises(Refused) as refused:
        call()
    assert str(refused.value).endswith(".")
    return refused.value.code


def memory(decode: DecodeSide) -> list[bytes]:
    return [bytes(page) for page in decode.cache.pages]


def test_life_of_a_handed_over_sequence() -> None:
    decode = DecodeSide()
    # 1. Pages are reserved.
    ticket = decode.reserve(REQUEST)
    assert decode.pool.counts()[PageState.RESERVED] == 2
    # 2. The first page arrives, the second in two segments.
    first, second = prompt_segments(ticket, REQUEST)
    decode.phase.accept([first])
    assert decode.pool.counts()[PageState.FILLING] == 2
    half = LAYOUT.page_bytes // 2
    decode.phase.accept([make_segment(ticket, 1, second.payload[half:], offset=half)])
    decode.phase.accept([make_segment(ticket, 1, second.payload[:half])])
    assert decode.phase.counters.num_kv_bytes == 2 * LAYOUT.page_bytes
    # 3. The commit: nothing was said before it.
    assert decode.step() is None
    assert decode.sink.emits == []
    decode.phase.commit(make_commit(ticket, TOKEN, logprobs=TokenLogprobs(logprob=-1.5)))
    assert decode.pool.counts()[PageState.USED] == 2
    # 4. Its stream begins with index 0, copied from the commit, and ends by length.
    decode.run_out()
    events = decode.sink.tokens_of(REQUEST.key)
    assert [event.index for event in events] == [0, 1, 2, 3, 4]
    assert [event.token_id for event in events] == expected_tokens(REQUEST.prompt_token_ids, 5)
    assert events[0].logprobs == TokenLogprobs(logprob=-1.5)
    assert [event.finish_reason for event in events[:-1]] == [None] * 4
    assert events[-1].finish_reason is not None
    # 5. Nothing is left.
    assert_no_leaks(decode.pool)


def test_a_commit_of_what_is_no_token_is_refused_and_changes_nothing() -> None:
    decode = DecodeSide()
    ticket = decode.reserve(REQUEST)
    decode.phase.accept(prompt_segments(ticket, REQUEST))
    beside = TokenLogprobs(logprob=-1.0, top=((2**31, -1.0),))
    for commit in (make_commit(ticket, 2**31), make_commit(ticket, NUM_TOKENS), make_commit(ticket, TOKEN, logprobs=beside)):
        assert code_of(lambda commit=commit: decode.phase.commit(commit)) is RefusalCode.MALFORMED  # type: ignore[misc]
    assert decode.step() is None
    decode.phase.commit(make_commit(ticket, TOKEN))
    decode.run_out()
    assert decode.token_ids(REQUEST.key) == expected_tokens(REQUEST.prompt_token_ids, 5)
    assert_no_leaks(decode.pool)


def test_a_write_for_a_lower_attempt_touches_nothing() -> None:
    decode = DecodeSide()
    old = decode.reserve(REQUEST, 1)
    decode.phase.accept(prompt_segments(old, REQUEST)[:1])
    new = decode.reserve(REQUEST, 2)
    before = memory(decode)
    for segment in (make_segment(old, 0, b"\xff" * 32), make_segment(old, 1, b"\xff" * 32)):
        assert code_of(lambda segment=segment: decode.phase.accept([segment])) is RefusalCode.STALE_ATTEMPT  # type: ignore[misc]
    assert code_of(lambda: decode.phase.commit(make_commit(old, TOKEN))) is RefusalCode.STALE_ATTEMPT
    assert memory(decode) == before
    assert decode.phase.counters.refusals[RefusalCode.STALE_ATTEMPT] == 3
    # What the old attempt had sent does not count for the new one.
    decode.phase.accept(prompt_segments(new, REQUEST)[1:])
    assert code_of(lambda: decode.phase.commit(make_commit(new, TOKEN))) is RefusalCode.INCOMPLETE


def test_a_retry_gets_new_generations_of_the_same_pages_under_the_same_reservation() -> None:
    decode = DecodeSide()
    old = decode.reserve(REQUEST, 1)
    generations = {record.page_id: record.generation for record in decode.pool.snapshot().pages}
    new = decode.reserve(REQUEST, 2)
    assert new.reservation_id == old.reservation_id
    assert {r.page_id: r.generation for r in decode.pool.snapshot().pages} == {p: g + 1 for p, g in generations.items()}
    assert {owner.attempt for record in decode.pool.snapshot().pages for owner in record.owners} == {2}
    assert code_of(lambda: decode.reserve(REQUEST, 1)) is RefusalCode.STALE_ATTEMPT


def test_a_retry_while_decoding_starts_over() -> None:
    decode = DecodeSide()
    decode.begin(REQUEST, 1)
    decode.step()
    decode.begin(REQUEST, 2)
    decode.run_out()
    assert decode.token_ids(REQUEST.key, 2) == expected_tokens(REQUEST.prompt_token_ids, 5)
    assert [event.index for event in decode.sink.tokens_of(REQUEST.key, 2)] == [0, 1, 2, 3, 4]
    assert_no_leaks(decode.pool)


def test_an_attempt_that_was_never_issued_is_unknown() -> None:
    decode = DecodeSide()
    ticket = replace(decode.reserve(REQUEST, 1), attempt=2)
    assert code_of(lambda: decode.phase.accept(prompt_segments(ticket, REQUEST))) is RefusalCode.UNKNOWN_RESERVATION
    assert code_of(lambda: decode.phase.commit(make_commit(ticket, TOKEN))) is RefusalCode.UNKNOWN_RESERVATION


def test_unknown_reservations_create_no_state() -> None:
    decode = DecodeSide()
    ticket = replace(decode.reserve(REQUEST), reservation_id=ReservationId("f" * 32))
    decode.phase.abort(REQUEST.key, 1)
    assert code_of(lambda: decode.phase.accept(prompt_segments(ticket, REQUEST))) is RefusalCode.UNKNOWN_RESERVATION
    assert code_of(lambda: decode.phase.commit(make_commit(ticket, TOKEN))) is RefusalCode.UNKNOWN_RESERVATION
    decode.phase.abort(make_request(name="unknown").key, 9)
    assert decode.reserve(make_request(name="unknown"), 1).attempt == 1
    decode.phase.abort(make_request(name="unknown").key, 1)
    assert_no_leaks(decode.pool)


def test_segments_outside_the_plan_are_refused_whole() -> None:
    decode = DecodeSide()
    ticket = decode.reserve(REQUEST, num_evictions=1)
    before = memory(decode)
    good = prompt_segments(ticket, REQUEST)[0]
    too_far = make_segment(ticket, 2, b"\xff" * 32)  # the reservation's third page is for the answer
    assert code_of(lambda: decode.phase.accept([good, too_far])) is RefusalCode.MALFORMED
    other = replace(good, reservation_id=ReservationId("other"))
    assert code_of(lambda: decode.phase.accept([good, other])) is RefusalCode.MALFORMED
    assert memory(decode) == before
    assert decode.pool.counts()[PageState.RESERVED] == 3
    decode.phase.accept([])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"num_bytes_sent": 1}, RefusalCode.MALFORMED),
        ({"key": make_request(name="other").key}, RefusalCode.MALFORMED),
    ],
)
def test_a_commit_that_contradicts_the_reservation_is_refused(change: dict[str, object], code: RefusalCode) -> None:
    decode = DecodeSide()
    ticket = decode.reserve(REQUEST)
    decode.phase.accept(prompt_segments(ticket, REQUEST))
    assert code_of(lambda: decode.phase.commit(replace(make_commit(ticket, TOKEN), **change))) is code  # type: ignore[arg-type]
    decode.phase.commit(make_commit(ticket, TOKEN))  # and does no harm to the right one


def test_a_commit_before_every_byte_is_incomplete_and_may_come_again() -> None:
    decode = DecodeSide()
    ticket = decode.reserve(REQUEST)
    first, second = prompt_segments(ticket, REQUEST)
    decode.phase.accept([first])
    assert code_of(lambda: decode.phase.commit(make_commit(ticket, TOKEN))) is RefusalCode.INCOMPLETE
    decode.phase.accept([second])
    decode.phase.commit(make_commit(ticket, TOKEN))


def test_a_repeated_commit_changes_nothing_and_another_token_is_refused_and_counted() -> None:
    decode = DecodeSide()
    # 1. While decoding.
    ticket = decode.begin(REQUEST)
    decode.phase.commit(make_commit(ticket, TOKEN))
    assert code_of(lambda: decode.phase.commit(make_commit(ticket, TOKEN + 1))) is RefusalCode.TOKEN_MISMATCH
    # 2. After the end: the same answers.
    decode.run_out()
    decode.phase.commit(make_commit(ticket, TOKEN))
    assert code_of(lambda: decode.phase.commit(make_commit(ticket, TOKEN + 1))) is RefusalCode.TOKEN_MISMATCH
    assert decode.phase.counters.refusals[RefusalCode.TOKEN_MISMATCH] == 2
    assert [event.index for event in decode.sink.tokens_of(REQUEST.key)] == [0, 1, 2, 3, 4]
    # 3. One lease later it is forgotten.
    decode.clock.advance(LEASE_S)
    assert code_of(lambda: decode.phase.commit(make_commit(ticket, TOKEN))) is RefusalCode.UNKNOWN_RESERVATION
    assert_no_leaks(decode.pool)


def test_segments_sent_again_are_accepted_and_not_written() -> None:
    decode = DecodeSide()
    ticket = decode.reserve(REQUEST)
    first, second = prompt_segments(ticket, REQUEST)
    decode.phase.accept([first])
    decode.phase.accept([first, second])
    assert decode.phase.counters.num_kv_bytes == 2 * LAYOUT.page_bytes
    decode.phase.commit(make_commit(ticket, TOKEN))
    decode.step()
    before = memory(decode)
    decode.phase.accept([second])  # decode has written its own keys into this page since
    assert memory(decode) == before
    decode.run_out()
    assert decode.token_ids(REQUEST.key) == expected_tokens(REQUEST.prompt_token_ids, 5)


def test_the_routers_log_outranks_a_commit() -> None:
    decode = DecodeSide()
    request = make_request(6, max_tokens=5, output_token_ids=(TOKEN,))
    ticket = decode.reserve(request)
    decode.phase.accept(prompt_segments(ticket, request))
    assert code_of(lambda: decode.phase.commit(make_commit(ticket, TOKEN + 1))) is RefusalCode.TOKEN_MISMATCH
    decode.phase.commit(make_commit(ticket, TOKEN))
    decode.run_out()
    assert decode.token_ids(request.key) == expected_tokens(request.prompt_token_ids, 5)


def test_after_the_lease_writes_and_commits_say_so() -> None:
    decode = DecodeSide()
    ticket = decode.reserve(REQUEST)
    segments = prompt_segments(ticket, REQUEST)
    decode.phase.accept(segments[:1])
    before = memory(decode)
    # Page writes do not renew: this one came late, and the lease still ends on time.
    decode.clock.advance(LEASE_S)
    decode.step()
    assert code_of(lambda: decode.phase.accept(segments[1:])) is RefusalCode.LEASE_EXPIRED
    assert code_of(lambda: decode.phase.commit(make_commit(ticket, TOKEN))) is RefusalCode.LEASE_EXPIRED
    assert memory(decode) == before
    assert_no_leaks(decode.pool)


def test_lent_pages_are_filled_by_nobody_else() -> None:
    decode = DecodeSide()
    ticket = decode.reserve(REQUEST)
    pages = decode.phase.lend_pages(ticket)
    assert decode.phase.lend_pages(ticket) == pages
    assert decode.pool.counts()[PageState.FILLING] == len(pages) == 2
    assert code_of(lambda: decode.phase.accept(prompt_segments(ticket, REQUEST))) is RefusalCode.MALFORMED
    assert code_of(lambda: decode.phase.commit(make_commit(ticket, TOKEN))) is RefusalCode.MALFORMED
    decode.phase.commit(replace(make_commit(ticket, TOKEN), num_bytes_sent=0))
    assert code_of(lambda: decode.phase.lend_pages(ticket)) is RefusalCode.MALFORMED


def test_pages_that_arrive_from_elsewhere_are_not_lent() -> None:
    decode = DecodeSide()
    ticket = decode.reserve(REQUEST)
    decode.phase.accept(prompt_segments(ticket, REQUEST)[:1])
    assert code_of(lambda: decode.phase.lend_pages(ticket)) is RefusalCode.MALFORMED
