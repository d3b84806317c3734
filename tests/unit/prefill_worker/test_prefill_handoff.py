"""Token 0, the hand-off and its ends, retries, leases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.page_state import PageState
from serving_core.token_event import FailureKind, FinishReason, TokenLogprobs
from serving_core.transfer_ticket import TransferTicket
from tests.pages import assert_no_leaks
from tests.phases import LAYOUT, LEASE_S, DecodeSide, FakeHandoff, PrefillSide, make_request, next_token

REQUEST = make_request(10, max_tokens=5)
TOKEN = next_token(REQUEST.prompt_token_ids)
NUM_PAGES = LAYOUT.num_pages_for(10)


def ticket_for(attempt: int = 1) -> TransferTicket:
    return DecodeSide().reserve(REQUEST, attempt)


def start(prefill: PrefillSide, attempt: int = 1) -> FakeHandoff:
    return prefill.admit(REQUEST, ticket_for(attempt))


def code_of(call: Callable[[], object]) -> RefusalCode:
    with pytest.raises(Refused) as refused:
        call()
    return refused.value.code


def _queued(prefill: PrefillSide) -> FakeHandoff:
    return start(prefill)


def _half_computed(prefill: PrefillSide) -> FakeHandoff:
    handoff = start(prefill)
    prefill.step()
    assert handoff.commit is None
    return handoff


def _sending(prefill: PrefillSide) -> FakeHandoff:
    handoff = start(prefill)
    prefill.run_out()
    assert handoff.commit is not None
    return handoff


def _half_kept(prefill: PrefillSide) -> FakeHandoff:
    handoff = _half_computed(prefill)
    prefill.end_handoff(handoff, Refused(RefusalCode.LEASE_EXPIRED, "The lease has ended."))
    return handoff


def _kept_unstarted(prefill: PrefillSide) -> FakeHandoff:
    handoff = start(prefill)
    prefill.end_handoff(handoff, Refused(RefusalCode.LEASE_EXPIRED, "The lease has ended."))
    return handoff


def _kept(prefill: PrefillSide) -> FakeHandoff:
    handoff = _sending(prefill)
    prefill.end_handoff(handoff, Refused(RefusalCode.UNKNOWN_RESERVATION, "Never heard of it."))
    return handoff


STATES = {
    "queued": _queued,
    "half computed": _half_computed,
    "sending": _sending,
    "kept unstarted": _kept_unstarted,
    "half kept": _half_kept,
    "kept": _kept,
}
in_every_state = pytest.mark.parametrize("state", STATES)


def test_life_of_a_prompt() -> None:
    prefill = PrefillSide(max_num_batched_tokens=8)
    # 1. It is queued, then computed in two chunks.
    handoff = start(prefill)
    prefill.step()
    assert prefill.pool.counts()[PageState.USED] == NUM_PAGES
    assert prefill.sink.emits == []
    # 2. The last chunk gives token 0: the router gets its early copy, the hand-off the commit.
    prefill.step()
    (event,) = prefill.sink.events
    (early_copy,) = prefill.sink.tokens_of(REQUEST.key)
    assert event is early_copy
    assert (early_copy.index, early_copy.token_id, early_copy.finish_reason) == (0, TOKEN, None)
    assert handoff.commit is not None
    assert (handoff.commit.token_id, handoff.commit.logprobs) == (TOKEN, TokenLogprobs(logprob=-0.5))
    # 3. Pages stay, as sending, until decode acknowledges.
    assert prefill.pool.counts()[PageState.SENDING] == NUM_PAGES
    assert prefill.step() is None
    assert prefill.phase.status().num_running == 1
    prefill.end_handoff(handoff, None)
    assert prefill.phase.counters.num_generation_tokens == 1
    assert prefill.phase.expire(0.0) is None
    assert_no_leaks(prefill.pool)


@pytest.mark.parametrize(
    ("page_size", "num_cached_tokens", "first_ordinal"), [(2, 0, 0), (2, 6, 1), (8, 0, 0), (8, 8, 2), (3, 3, 0), (3, 9, 2)]
)
def test_pages_are_this_workers_whatever_those_of_the_receiver_are(
    page_size: int, num_cached_tokens: int, first_ordinal: int
) -> None:
    prefill = PrefillSide(max_num_batched_tokens=8)
    layout = replace(LAYOUT, page_size=page_size)
    ticket = replace(ticket_for(), layout=layout, num_cached_tokens=num_cached_tokens)
    handoff = prefill.admit(REQUEST, ticket)
    # 1. It takes as many pages as it needs itself, and offers those that are full.
    prefill.step()
    assert prefill.pool.counts()[PageState.USED] == NUM_PAGES
    assert [ordinal for ordinal, _ in handoff.pages] == list(range(first_ordinal, 8 // LAYOUT.page_size))
    # 2. With the prompt's end it offers the last one, in part.
    prefill.step()
    assert [ordinal for ordinal, _ in handoff.pages] == list(range(first_ordinal, NUM_PAGES))
    assert handoff.commit is not None
    # 3. A retry may lead to a worker with pages of yet another size.
    prefill.end_handoff(handoff, WorkerLost("The way is lost."))
    retry = prefill.admit(REQUEST, ticket_for(attempt=2))
    assert [ordinal for ordinal, _ in retry.pages] == list(range(NUM_PAGES))
    prefill.end_handoff(retry, None)
    assert_no_leaks(prefill.pool)


def test_a_second_start_of_the_same_attempt_changes_nothing() -> None:
    prefill = PrefillSide()
    first = start(prefill)
    prefill.step()
    second = start(prefill)
    assert second.has_ended
    prefill.run_out()
    assert (first.commit is None, second.commit) == (False, None)
    prefill.end_handoff(first, None)
    # Also after its end, for one lease: nothing is computed or sampled again.
    start(prefill)
    assert prefill.step() is None
    assert_no_leaks(prefill.pool)


@in_every_state
def test_abort_releases_from_every_state_and_is_idempotent(state: str) -> None:
    prefill = PrefillSide()
    handoff = STATES[state](prefill)
    num_events = len(prefill.sink.events)
    prefill.phase.abort(REQUEST.key, 1)
    prefill.phase.abort(REQUEST.key, 1)
    assert handoff.is_cancelled
    prefill.close_cancelled()
    assert prefill.step() is None
    assert len(prefill.sink.tokens_of(REQUEST.key)) + len(prefill.sink.failures) - num_events in (0, 1)
    assert prefill.phase.status().num_running + prefill.phase.status().num_waiting == 0
    assert_no_leaks(prefill.pool)


@in_every_state
def test_pages_wait_for_a_cancelled_handoff_that_may_still_read_them(state: str) -> None:
    prefill = PrefillSide()
    handoff = STATES[state](prefill)
    num_held = prefill.pool.num_pages - prefill.pool.num_available
    prefill.phase.abort(REQUEST.key, 1)
    if handoff.has_ended:
        assert_no_leaks(prefill.pool)
    else:
        assert prefill.pool.num_pages - prefill.pool.num_available == num_held
        assert prefill.phase.status().num_running == 1
        prefill.end_handoff(handoff, None)
        assert_no_leaks(prefill.pool)


@in_every_state
def test_the_end_of_the_lease_releases_from_every_state_and_is_told_once(state: str) -> None:
    prefill = PrefillSide()
    STATES[state](prefill)
    prefill.clock.advance(LEASE_S)
    prefill.run_out()
    prefill.close_cancelled()
    (failure,) = prefill.sink.failures
    is_kept = "kept" in state
    assert failure.kind is (FailureKind.HANDOFF if is_kept else FailureKind.LEASE_EXPIRED)
    assert prefill.phase.counters.num_leases_expired == 1
    assert_no_leaks(prefill.pool)


@in_every_state
def test_a_lease_that_is_renewed_keeps_the_pages(state: str) -> None:
    prefill = PrefillSide()
    STATES[state](prefill)
    num_free = prefill.pool.num_available
    for _ in range(4):
        prefill.clock.advance(LEASE_S - 1)
        prefill.phase.renew(frozenset({REQUEST.key, make_request(name="unknown").key}))
        assert prefill.phase.expire(prefill.clock.now()) == prefill.clock.now() + LEASE_S
    assert prefill.pool.num_available == num_free


@in_every_state
def test_a_retry_sends_what_is_computed_and_recomputes_nothing(state: str) -> None:
    prefill = PrefillSide()
    # 1. Whatever has happened to attempt 1,
    old = STATES[state](prefill)
    num_computed = prefill.phase.counters.num_prompt_tokens
    num_sampled = prefill.phase.counters.num_generation_tokens
    num_full_pages = len(old.pages)
    # 2. the router reserves elsewhere and starts attempt 2: what is there is offered at once.
    new = start(prefill, 2)
    assert old.is_cancelled or old.has_ended
    assert len(new.pages) == num_full_pages
    # 3. The old hand-off's late report does not touch it.
    prefill.close_cancelled()
    prefill.run_out()
    assert prefill.phase.counters.num_prompt_tokens - num_computed == 10 - num_computed
    assert prefill.phase.counters.num_generation_tokens == 1
    assert num_sampled in (0, 1)
    # 4. Attempt 2 commits the same token, and its early copy bears its number.
    assert new.commit is not None
    assert (new.commit.attempt, new.commit.token_id) == (2, TOKEN)
    assert prefill.token_ids(REQUEST.key, 2) == [TOKEN]
    assert {owner.attempt for record in prefill.pool.snapshot().pages for owner in record.owners} == {2}
    # 5. Lower attempts are over, and the end is the usual one.
    assert code_of(lambda: start(prefill, 1)) is RefusalCode.STALE_ATTEMPT
    prefill.end_handoff(new, None)
    assert_no_leaks(prefill.pool)


def test_pages_of_a_retry_wait_for_both_handoffs() -> None:
    prefill = PrefillSide()
    old = _sending(prefill)
    new = start(prefill, 2)
    prefill.end_handoff(new, None)
    assert prefill.pool.counts()[PageState.SENDING] == NUM_PAGES
    prefill.end_handoff(old, None)
    assert_no_leaks(prefill.pool)


@pytest.mark.parametrize(
    "error",
    [
        Refused(RefusalCode.LEASE_EXPIRED, "The lease has ended."),
        Refused(RefusalCode.UNKNOWN_RESERVATION, "Never heard of it."),
        Refused(RefusalCode.STALE_ATTEMPT, "A newer attempt was issued."),
        WorkerLost("It is gone."),
    ],
)
@pytest.mark.parametrize("is_computed", [False, True])
def test_when_the_reservation_is_gone_prefill_stops_and_keeps_its_pages(error: Refused | WorkerLost, is_computed: bool) -> None:
    prefill = PrefillSide()
    handoff = _sending(prefill) if is_computed else _half_computed(prefill)
    prefill.end_handoff(handoff, error)
    assert prefill.step() is None
    (failure,) = prefill.sink.failures
    assert (failure.kind, failure.message) == (FailureKind.HANDOFF, str(error))
    assert prefill.pool.num_pages - prefill.pool.num_available == NUM_PAGES
    prefill.phase.abort(REQUEST.key, 1)
    assert_no_leaks(prefill.pool)


@pytest.mark.parametrize(
    "code", [RefusalCode.TOKEN_MISMATCH, RefusalCode.MALFORMED, RefusalCode.CHECKSUM_MISMATCH, RefusalCode.INCOMPLETE]
)
def test_when_the_pages_are_at_fault_they_are_released(code: RefusalCode) -> None:
    prefill = PrefillSide()
    prefill.end_handoff(_sending(prefill), Refused(code, "No."))
    prefill.step()
    (failure,) = prefill.sink.failures
    assert (failure.kind, failure.message) == (FailureKind.HANDOFF, "No.")
    assert_no_leaks(prefill.pool)


def test_the_end_of_an_unknown_handoff_is_a_no_op() -> None:
    prefill = PrefillSide()
    handoff = start(prefill)
    prefill.phase.handoff_ended(make_request(name="unknown").key, 1, None)
    prefill.phase.handoff_ended(REQUEST.key, 7, None)
    prefill.run_out()
    assert handoff.commit is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_tokens": 1}, FinishReason.LENGTH),
        ({"stop_token_ids": (TOKEN,)}, FinishReason.STOP),
        ({"eos": TOKEN}, FinishReason.STOP),
        ({"num_prompt_tokens": 63}, FinishReason.LENGTH),
    ],
)
def test_a_first_token_that_ends_the_sequence_is_not_committed(change: dict[str, int], reason: FinishReason) -> None:
    eos = change.pop("eos", None)
    prefill = PrefillSide(eos=frozenset() if eos is None else frozenset({eos}), max_num_batched_tokens=100)
    request = make_request(**{"num_prompt_tokens": 10, **change})  # type: ignore[arg-type]
    handoff = prefill.admit(request, DecodeSide().reserve(request))
    prefill.run_out()
    (event,) = prefill.sink.tokens_of(request.key)
    assert (event.index, event.finish_reason) == (0, reason)
    assert handoff.commit is None
    assert handoff.is_cancelled
    prefill.close_cancelled()
    assert_no_leaks(prefill.pool)


def test_a_position_in_the_routers_log_is_taken_not_sampled() -> None:
    prefill = PrefillSide()
    request = make_request(10, output_token_ids=(123,))
    handoff = prefill.admit(request, DecodeSide().reserve(request))
    prefill.run_out()
    assert handoff.commit is not None
    assert handoff.commit.token_id == 123
    assert prefill.token_ids(request.key) == [123]
    assert all(row.sample is None for plan in prefill.runner.plans for row in plan.rows)
    assert prefill.phase.counters.num_generation_tokens == 0


def test_a_retry_with_a_log_that_denies_token_0_is_refused() -> None:
    prefill = PrefillSide()
    handoff = _sending(prefill)
    request = make_request(10, output_token_ids=(TOKEN + 1,))
    assert code_of(lambda: prefill.admit(request, ticket_for(2))) is RefusalCode.TOKEN_MISMATCH
    other = make_request(10, max_tokens=9)
    assert code_of(lambda: prefill.admit(other, ticket_for(2))) is RefusalCode.MALFORMED
    assert not handoff.is_cancelled


def test_a_failed_row_costs_its_own_sequence_only() -> None:
    prefill = PrefillSide(max_num_batched_tokens=100)
    bad = start(prefill)
    request = make_request(name="good")
    good = prefill.admit(request, DecodeSide().reserve(request))
    prefill.runner.failing.add(REQUEST.key)
    prefill.run_out()
    (failure,) = prefill.sink.failures
    assert (failure.key, failure.kind) == (REQUEST.key, FailureKind.INTERNAL)
    assert bad.is_cancelled
    assert good.commit is not None
    prefill.close_cancelled()
    prefill.end_handoff(good, None)
    assert_no_leaks(prefill.pool)


def test_a_released_attempt_does_not_come_back() -> None:
    prefill = PrefillSide()
    start(prefill)
    prefill.phase.abort(REQUEST.key, 2)
    assert start(prefill, 2).has_ended  # the fence covers what the release named
    assert start(prefill, 3) in prefill.handoffs
    prefill.phase.abort(REQUEST.key, 3)
    prefill.close_cancelled()
    assert_no_leaks(prefill.pool)
