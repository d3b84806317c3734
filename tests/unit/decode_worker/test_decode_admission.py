"""What is reserved, in which order, and who waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving_core.errors import RefusalCode, Refused
from serving_core.page_state import PageState
from serving_core.token_event import FailureKind
from serving_core.transfer_ticket import TransferTicket
from tests.pages import assert_no_leaks
from tests.phases import LEASE_S, MAX_MODEL_LEN, ROUTER, DecodeSide, make_commit, make_request, prompt_segments


def code_of(call: Callable[[], object]) -> RefusalCode:
    with pytest.raises(Refused) as refused:
        call()
    assert str(refused.value).endswith(".")
    return refused.value.code


def test_prompt_and_a_token_more_are_reserved() -> None:
    decode = DecodeSide()
    ticket = decode.reserve(make_request(6, max_tokens=50))
    assert decode.pool.counts()[PageState.RESERVED] == 2  # 7 tokens in pages of 4
    assert ticket.num_prompt_pages == 2
    assert ticket.attempt == 1
    assert ticket.lease_s == LEASE_S
    assert ticket.first_page == 0


def test_the_window_bounds_what_a_sequence_can_need() -> None:
    DecodeSide(num_pages=MAX_MODEL_LEN // 4).reserve(make_request(6, max_tokens=10_000))
    decode = DecodeSide(num_pages=MAX_MODEL_LEN // 4 - 1)
    assert code_of(lambda: decode.reserve(make_request(6, max_tokens=10_000))) is RefusalCode.TOO_LARGE


def test_what_can_never_fit_is_refused_at_once() -> None:
    decode = DecodeSide(num_pages=2)
    assert code_of(lambda: decode.reserve(make_request(6, max_tokens=5))) is RefusalCode.TOO_LARGE
    decode = DecodeSide(num_pages=64)
    assert code_of(lambda: decode.reserve(make_request(MAX_MODEL_LEN))) is RefusalCode.TOO_LARGE
    log = tuple(range(4))
    no_room = make_request(MAX_MODEL_LEN - 4, max_tokens=9, output_token_ids=log)
    assert code_of(lambda: decode.reserve(no_room)) is RefusalCode.TOO_LARGE
    assert decode.phase.counters.refusals == {RefusalCode.TOO_LARGE: 2}
    assert_no_leaks(decode.pool)


def test_the_same_attempt_gets_the_same_ticket() -> None:
    decode = DecodeSide()
    request = make_request()
    assert decode.reserve(request) is decode.reserve(request)
    assert decode.pool.counts()[PageState.RESERVED] == 2


def test_pages_are_granted_in_order_of_arrival_and_a_small_request_never_overtakes() -> None:
    decode = DecodeSide(num_pages=4)
    # 1. Three of four pages are gone; a large request waits, a small one that would fit waits behind it.
    first = make_request(8, name="first", max_tokens=4)
    decode.reserve(first)
    large = decode.ask(make_request(8, name="large", max_tokens=8))
    small = decode.ask(make_request(2, name="small", max_tokens=1))
    assert (large, small) == ([], [])
    assert decode.phase.status().num_waiting == 2
    # 2. The first goes: the large one gets all, the small one waits on.
    decode.phase.abort(first.key, 1)
    decode.step()
    assert [type(answer) for answer in large] == [TransferTicket]
    assert small == []
    # 3. The large one goes.
    decode.phase.abort(make_request(name="large").key, 1)
    decode.step()
    assert [type(answer) for answer in small] == [TransferTicket]
    decode.phase.abort(make_request(name="small").key, 1)
    assert_no_leaks(decode.pool)


def test_the_waiting_list_is_bounded_and_says_how_many_pages_are_free() -> None:
    decode = DecodeSide(num_pages=4, max_waiting=1)
    decode.reserve(make_request(8, name="a", max_tokens=4))
    assert decode.ask(make_request(8, name="b", max_tokens=4)) == []
    (answer,) = decode.ask(make_request(8, name="c", max_tokens=4))
    assert isinstance(answer, Refused)
    assert answer.code is RefusalCode.RESOURCE_EXHAUSTED
    assert "1 are free" in str(answer)
    assert decode.phase.status().num_waiting == 1
    # Nothing is remembered of it: the same attempt may come again.
    decode.phase.abort(make_request(name="b").key, 1)
    assert decode.ask(make_request(8, name="c", max_tokens=4)) == []


def test_seats_are_bounded_by_max_num_seqs() -> None:
    decode = DecodeSide(max_num_seqs=2)
    for name in "ab":
        decode.reserve(make_request(name=name))
    waiting = decode.ask(make_request(name="c"))
    assert waiting == []
    decode.phase.abort(make_request(name="a").key, 1)
    decode.step()
    assert [type(answer) for answer in waiting] == [TransferTicket]


def test_a_withdrawn_caller_leaves_the_list_and_may_ask_again() -> None:
    decode = DecodeSide(num_pages=3)
    decode.reserve(make_request(name="a"))
    answers: list[TransferTicket | Refused] = []
    request = make_request(name="b")
    answer = answers.append
    decode.phase.reserve(request, 1, ROUTER, answer)
    decode.phase.withdraw(request.key, 1, answer)
    assert decode.phase.status().num_waiting == 0
    decode.phase.abort(make_request(name="a").key, 1)
    decode.step()
    assert answers == []
    assert isinstance(decode.ask(request)[0], TransferTicket)


def test_withdrawing_just_after_the_grant_frees_the_pages() -> None:
    decode = DecodeSide()
    answers: list[TransferTicket | Refused] = []
    answer = answers.append
    decode.phase.reserve(make_request(), 1, ROUTER, answer)
    decode.phase.withdraw(make_request().key, 1, answer)
    assert_no_leaks(decode.pool)


def test_withdrawing_one_of_two_callers_leaves_the_other_its_reservation() -> None:
    decode = DecodeSide()
    answers: list[TransferTicket | Refused] = []
    first, second = answers.append, (lambda answer: None)
    decode.phase.reserve(make_request(), 1, ROUTER, first)
    decode.phase.reserve(make_request(), 1, ROUTER, second)
    decode.phase.withdraw(make_request().key, 1, first)
    decode.phase.withdraw(make_request().key, 1, first)
    assert decode.pool.counts()[PageState.RESERVED] == 2


def test_withdrawing_is_too_late_once_bytes_have_come_and_harmless_for_unknown_ids() -> None:
    decode = DecodeSide()
    request = make_request()
    answers: list[TransferTicket | Refused] = []
    answer = answers.append
    decode.phase.reserve(request, 1, ROUTER, answer)
    (ticket,) = answers
    assert isinstance(ticket, TransferTicket)
    decode.phase.accept(prompt_segments(ticket, request)[:1])
    decode.phase.withdraw(request.key, 1, answer)
    decode.phase.withdraw(request.key, 7, answer)
    decode.phase.withdraw(make_request(name="unknown").key, 1, answer)
    assert decode.pool.counts()[PageState.FILLING] == 2


def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_holds() -> None:
    # 1. One sequence is reserved, one waits.
    decode = DecodeSide(num_pages=3)
    request = make_request(name="held")
    ticket = decode.reserve(request)
    waiting = decode.ask(make_request(name="waiting"))
    # 2. Drain: the waiting one is turned away, new ones too.
    decode.phase.drain()
    assert isinstance(waiting[0], Refused)
    assert waiting[0].code is RefusalCode.DRAINING
    assert code_of(lambda: decode.reserve(make_request(name="new"))) is RefusalCode.DRAINING
    assert decode.reserve(request) is ticket
    # 3. The held one runs to its end.
    decode.phase.accept(prompt_segments(ticket, request))
    decode.phase.commit(make_commit(ticket, 5))
    decode.run_out()
    assert len(decode.token_ids(request.key)) == 5
    assert decode.phase.status().num_running == 0
    assert_no_leaks(decode.pool)


def test_no_router_named_a_waiting_sequence_for_one_lease() -> None:
    decode = DecodeSide(num_pages=3)
    held, waiting = make_request(name="a"), make_request(name="b")
    decode.reserve(held)
    answers = decode.ask(waiting)
    decode.clock.advance(4.0)
    decode.phase.renew(frozenset({held.key}))
    decode.clock.advance(2.0)
    decode.step()
    assert isinstance(answers[0], Refused)
    assert answers[0].code is RefusalCode.LEASE_EXPIRED
    (failure,) = decode.sink.failures
    assert (failure.key, failure.kind) == (waiting.key, FailureKind.LEASE_EXPIRED)
    assert decode.phase.counters.num_leases_expired == 1
    assert decode.phase.status().num_running == 1


def test_a_retry_keeps_its_place_in_the_waiting_list() -> None:
    decode = DecodeSide(num_pages=3)
    decode.reserve(make_request(name="a"))
    old = decode.ask(make_request(name="b"), 1)
    behind = decode.ask(make_request(name="c"), 1)
    new = decode.ask(make_request(name="b"), 2)
    assert isinstance(old[0], Refused)
    assert old[0].code is RefusalCode.STALE_ATTEMPT
    decode.phase.abort(make_request(name="a").key, 1)
    decode.step()
    assert behind == []
    assert isinstance(new[0], TransferTicket)
    assert new[0].attempt == 2


def test_an_attempt_that_ended_here_is_not_begun_again() -> None:
    decode = DecodeSide()
    request = make_request()
    decode.reserve(request)
    decode.phase.abort(request.key, 3)
    for attempt in (1, 2, 3):
        assert code_of(lambda attempt=attempt: decode.reserve(request, attempt)) is RefusalCode.STALE_ATTEMPT  # type: ignore[misc]
    assert decode.reserve(request, 4).attempt == 4


def test_attempts_are_counted_from_one() -> None:
    decode = DecodeSide()
    assert code_of(lambda: decode.reserve(make_request(), 0)) is RefusalCode.MALFORMED
    assert_no_leaks(decode.pool)


def test_those_whose_clients_have_tokens_wait_before_the_others_and_in_a_list_of_their_own() -> None:
    decode = DecodeSide(num_pages=4, max_waiting=1)
    # 1. All pages are taken; one of each kind waits, and no more may.
    first = make_request(12, name="first", max_tokens=4)
    decode.reserve(first)
    fresh = decode.ask(make_request(name="fresh"))
    back = decode.ask(make_request(name="back", output_token_ids=(1, 2)), 2)
    assert (fresh, back) == ([], [])
    for request in (make_request(name="more"), make_request(name="more", output_token_ids=(1, 2))):
        (answer,) = decode.ask(request)
        assert isinstance(answer, Refused)
        assert answer.code is RefusalCode.RESOURCE_EXHAUSTED
    # 2. Room for one: the one with a log is served first, though it came later.
    decode.phase.abort(first.key, 1)
    decode.step()
    assert [type(answer) for answer in back] == [TransferTicket]
    assert fresh == []


def test_a_retry_with_another_prompt_is_malformed_and_changes_nothing() -> None:
    decode = DecodeSide()
    ticket = decode.reserve(make_request(6))
    assert code_of(lambda: decode.reserve(make_request(7), 2)) is RefusalCode.MALFORMED
    assert decode.reserve(make_request(6)) is ticket
