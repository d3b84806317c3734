"""Continuous batching, token rules, ends from every state, and what the routers are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving_core.errors import RefusalCode
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RouterId
from serving_core.token_event import FailureKind, FinishReason
from tests.pages import assert_no_leaks
from tests.phases import (
    LAYOUT,
    LEASE_S,
    MAX_MODEL_LEN,
    ROUTER,
    DecodeSide,
    expected_tokens,
    make_commit,
    make_request,
    next_token,
    prompt_segments,
)

STATES: dict[str, Callable[[DecodeSide, GenerateRequest], object]] = {
    "waiting": lambda decode, request: (decode.ask(make_request(59, name="big", max_tokens=5)), decode.ask(request)),
    "reserved": lambda decode, request: decode.reserve(request),
    "filling": lambda decode, request: decode.phase.accept(prompt_segments(decode.reserve(request), request)[:1]),
    "lent": lambda decode, request: decode.phase.lend_pages(decode.reserve(request)),
    "committed": lambda decode, request: decode.begin(request),
    "decoding": lambda decode, request: (decode.begin(request), decode.step()),
}


@pytest.fixture(params=STATES)
def held(request: pytest.FixtureRequest) -> tuple[DecodeSide, GenerateRequest]:
    """A decode side that holds one sequence, in each state in turn."""
    decode = DecodeSide()
    wanted = make_request()
    STATES[request.param](decode, wanted)
    return decode, wanted


def abort_big(decode: DecodeSide) -> None:
    decode.phase.abort(make_request(name="big").key, 1)


def test_abort_releases_from_every_state_and_is_idempotent(held: tuple[DecodeSide, GenerateRequest]) -> None:
    decode, request = held
    abort_big(decode)
    decode.phase.abort(request.key, 1)
    decode.phase.abort(request.key, 1)
    assert decode.step() is None
    assert decode.phase.expire(1e9) is None
    assert decode.sink.failures == []
    assert_no_leaks(decode.pool)


def test_abort_below_the_held_attempt_does_nothing(held: tuple[DecodeSide, GenerateRequest]) -> None:
    decode, request = held
    decode.phase.abort(request.key, 0)
    assert sum((decode.phase.status().num_running, decode.phase.status().num_waiting)) >= 1


def test_a_lease_that_ends_releases_from_every_state_and_tells_the_router(held: tuple[DecodeSide, GenerateRequest]) -> None:
    decode, request = held
    abort_big(decode)
    decode.clock.advance(LEASE_S)
    decode.run_out()
    (failure,) = decode.sink.failures
    assert (failure.key, failure.attempt, failure.kind) == (request.key, 1, FailureKind.LEASE_EXPIRED)
    assert decode.phase.counters.num_leases_expired == 1
    assert_no_leaks(decode.pool)


def test_a_lease_that_is_renewed_goes_on_in_every_state(held: tuple[DecodeSide, GenerateRequest]) -> None:
    decode, request = held
    for _ in range(5):
        decode.clock.advance(LEASE_S - 1)
        decode.phase.renew(frozenset({request.key, make_request(name="big").key, make_request(name="unknown").key}))
        assert decode.phase.expire(decode.clock.now()) == decode.clock.now() + LEASE_S
    assert decode.sink.failures == []


def test_a_retry_works_from_every_state(held: tuple[DecodeSide, GenerateRequest]) -> None:
    decode, request = held
    abort_big(decode)
    decode.step()
    decode.begin(request, 2)
    decode.run_out()
    assert decode.token_ids(request.key, 2) == expected_tokens(request.prompt_token_ids, 5)
    assert_no_leaks(decode.pool)


def test_sequences_share_steps_and_answer_as_if_alone() -> None:
    decode = DecodeSide()
    requests = [make_request(number, name=f"r{number}", max_tokens=6 + number) for number in (1, 4, 5, 9)]
    for request in requests:
        decode.begin(request)
        decode.step()
    assert len(decode.runner.plans[-1].rows) == 4
    decode.run_out()
    for request in requests:
        assert decode.token_ids(request.key) == expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)
    assert decode.phase.counters.num_generation_tokens == sum(request.sampling.max_tokens - 1 for request in requests)
    assert_no_leaks(decode.pool)


def test_a_row_names_just_the_pages_it_needs() -> None:
    decode = DecodeSide()
    request = make_request(4, max_tokens=6)
    decode.begin(request)
    decode.run_out()
    for plan in decode.runner.plans:
        (row,) = plan.rows
        assert len(row.token_ids) == 1
        assert len(row.page_ids) == LAYOUT.num_pages_for(row.start_position + 1)
    assert [plan.rows[0].start_position for plan in decode.runner.plans] == [4, 5, 6, 7, 8]
    assert [plan.rows[0].sample.output_index for plan in decode.runner.plans if plan.rows[0].sample] == [1, 2, 3, 4, 5]


def test_each_router_gets_one_message_a_step() -> None:
    decode = DecodeSide()
    requests = [make_request(name=name) for name in "abcd"]
    for index, request in enumerate(requests):
        router_id = RouterId(f"router-{index % 2}")
        decode.phase.reserve(request, 1, router_id, lambda answer: None)
        ticket = decode.reserve(request)
        decode.phase.accept(prompt_segments(ticket, request))
        decode.phase.commit(make_commit(ticket, next_token(request.prompt_token_ids)))
    decode.step()
    assert [router_id for router_id, _ in decode.sink.emits] == [RouterId("router-0"), RouterId("router-1")]
    # Index 0 of both sequences waited for the step and travels with index 1.
    assert [len(events) for _, events in decode.sink.emits] == [4, 4]


def test_what_happens_without_a_step_is_told_at_once() -> None:
    decode = DecodeSide()
    decode.reserve(make_request())
    decode.clock.advance(LEASE_S)
    assert decode.step() is None
    assert len(decode.sink.failures) == 1


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_end_token_ends_the_sequence_and_is_reported(at: int) -> None:
    request = make_request(max_tokens=9)
    answer = expected_tokens(request.prompt_token_ids, 9)
    decode = DecodeSide(eos=frozenset({answer[at]}))
    decode.begin(request)
    decode.run_out()
    assert decode.token_ids(request.key) == answer[: at + 1]
    assert decode.sink.tokens_of(request.key)[-1].finish_reason is FinishReason.STOP
    assert_no_leaks(decode.pool)


def test_stop_token_ids_end_the_sequence() -> None:
    answer = expected_tokens(make_request().prompt_token_ids, 5)
    request = make_request(stop_token_ids=(answer[2],))
    decode = DecodeSide()
    decode.begin(request)
    decode.run_out()
    assert decode.token_ids(request.key) == answer[:3]


def test_end_tokens_are_banned_until_min_tokens() -> None:
    request = make_request(max_tokens=5, min_tokens=3, stop_token_ids=(2,))
    decode = DecodeSide(eos=frozenset({1}))
    decode.begin(request)
    decode.run_out()
    banned = [row.sample.banned_token_ids for plan in decode.runner.plans for row in plan.rows if row.sample]
    assert banned == [(1, 2), (1, 2), (), ()]


def test_the_context_limit_ends_the_sequence() -> None:
    request = make_request(MAX_MODEL_LEN - 3, max_tokens=20)
    decode = DecodeSide()
    decode.begin(request)
    decode.run_out()
    assert len(decode.token_ids(request.key)) == 3
    assert decode.sink.tokens_of(request.key)[-1].finish_reason is FinishReason.LENGTH
    assert_no_leaks(decode.pool)


def test_a_token_0_that_ends_the_sequence_is_not_run_past() -> None:
    """Prefill does not commit such a token; should it ever, decode keeps to the same rules."""
    request = make_request(max_tokens=1)
    decode = DecodeSide()
    decode.begin(request)
    assert decode.step() is None
    (event,) = decode.sink.tokens_of(request.key)
    assert event.finish_reason is FinishReason.LENGTH
    assert_no_leaks(decode.pool)


def test_a_failed_row_costs_its_own_sequence_only() -> None:
    decode = DecodeSide()
    bad, good = make_request(name="bad"), make_request(name="good")
    decode.begin(bad)
    ticket = decode.begin(good)
    decode.runner.failing.add(bad.key)
    decode.run_out()
    (failure,) = decode.sink.failures
    assert (failure.key, failure.kind, failure.message) == (bad.key, FailureKind.INTERNAL, "The fake row failed.")
    assert decode.token_ids(good.key) == expected_tokens(good.prompt_token_ids, 5)
    assert ticket.key == good.key
    assert_no_leaks(decode.pool)


def test_lease_end_while_decoding_is_not_put_off_by_steps() -> None:
    decode = DecodeSide()
    decode.begin(make_request(max_tokens=30))
    for _ in range(3):
        decode.clock.advance(2.0)
        decode.step()
    assert decode.phase.counters.num_leases_expired == 1
    assert decode.sink.emits[0][0] == ROUTER
    assert decode.phase.counters.refusals[RefusalCode.LEASE_EXPIRED] == 0
    assert_no_leaks(decode.pool)
