"""A sequence that comes with a log goes on from it: replayed, not sampled, told once, and a few tokens a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.page_state import PageState
from serving_core.token_event import FailureKind, FinishReason
from tests.pages import assert_no_leaks
from tests.phases import (
    LEASE_S,
    MAX_MODEL_LEN,
    DecodeSide,
    PrefillSide,
    deliver,
    expected_tokens,
    make_commit,
    make_request,
    next_token,
    prompt_segments,
)

MAX_TOKENS = 20
ANSWER = expected_tokens(make_request().prompt_token_ids, MAX_TOKENS)


def with_log(num_tokens: int, *, max_tokens: int = MAX_TOKENS, min_tokens: int = 0) -> GenerateRequest:
    return make_request(max_tokens=max_tokens, min_tokens=min_tokens, output_token_ids=tuple(ANSWER[:num_tokens]))


@pytest.mark.parametrize("num_logged", [1, 2, 3, 4, 5, 6, 10, 11, 15, 18, 19])
def test_a_log_of_any_length_goes_on_as_if_undisturbed(num_logged: int) -> None:
    decode = DecodeSide(max_replay_tokens=5)
    request = with_log(num_logged)
    # 1. The router's last token comes back at once: the hand-off has happened.
    decode.begin(request)
    assert decode.step() is not None
    first = decode.sink.tokens_of(request.key)[0]
    assert (first.index, first.token_id, first.logprobs) == (num_logged - 1, ANSWER[num_logged - 1], None)
    assert first.finish_reason is None
    # 2. Then what follows, each index once.
    decode.run_out()
    events = decode.sink.tokens_of(request.key)
    assert [event.index for event in events] == list(range(num_logged - 1, MAX_TOKENS))
    assert [event.token_id for event in events] == ANSWER[num_logged - 1 :]
    assert events[-1].finish_reason is FinishReason.LENGTH
    # 3. Nobody sampled a position twice, and no step replayed more than it may.
    rows = [row for plan in decode.runner.plans for row in plan.rows]
    assert [row.sample.output_index for row in rows if row.sample] == list(range(num_logged, MAX_TOKENS))
    assert decode.phase.counters.num_generation_tokens == MAX_TOKENS - num_logged
    assert max(len(row.token_ids) for row in rows) <= 5
    assert [token for row in rows for token in row.token_ids] == ANSWER[:-1]
    assert_no_leaks(decode.pool)


def test_others_get_a_token_in_every_step_of_a_replay_and_replays_share_the_budget() -> None:
    decode = DecodeSide(max_replay_tokens=4)
    other = make_request(name="other", max_tokens=30)
    decode.begin(other)
    first, second = (
        make_request(
            name=name, max_tokens=12, output_token_ids=tuple(expected_tokens(make_request(name=name).prompt_token_ids, 6))
        )
        for name in ("first", "second")
    )
    for request in (first, second):
        decode.begin(request)
    while len(decode.token_ids(second.key)) < 2:
        decode.step()
        sizes = {row.key: len(row.token_ids) for row in decode.runner.plans[-1].rows}
        assert sizes[other.key] == 1
        assert sum(size for size in sizes.values() if size > 1) <= 4
    decode.run_out()
    for request in (first, second):
        assert decode.token_ids(request.key) == expected_tokens(request.prompt_token_ids, 12)[5:]
    assert decode.token_ids(other.key) == expected_tokens(other.prompt_token_ids, 30)
    assert_no_leaks(decode.pool)


def test_the_whole_way_with_a_log_over_both_phases() -> None:
    for num_logged in (1, 2, 7):
        request = with_log(num_logged)
        prefill, decode = PrefillSide(), DecodeSide()
        # 1. Prefill computes the prompt and takes token 0 from the log.
        handoff = prefill.admit(request, decode.reserve(request))
        prefill.run_out()
        (early_copy,) = prefill.sink.tokens_of(request.key)
        assert (early_copy.index, early_copy.token_id, early_copy.finish_reason) == (0, ANSWER[0], None)
        assert prefill.phase.counters.num_generation_tokens == 0
        # 2. Decode goes on.
        deliver(prefill, decode, handoff)
        decode.run_out()
        assert decode.token_ids(request.key) == ANSWER[num_logged - 1 :]
        # 3. The same in place.
        beside = DecodeSide()
        local = PrefillSide(beside=beside)
        local.admit_local(request, beside.reserve(request))
        local.run_out()
        beside.run_out()
        assert beside.token_ids(request.key) == ANSWER[num_logged - 1 :]
        for pool in (prefill.pool, decode.pool, beside.pool):
            assert_no_leaks(pool)


def test_tokens_of_the_log_end_nothing_in_either_phase() -> None:
    """The router may know a token as ordinary that would end the sequence here, such as one below min_tokens."""
    eos = frozenset({ANSWER[0], ANSWER[2]})
    request = with_log(3)
    prefill, decode = PrefillSide(eos=eos), DecodeSide(eos=eos)
    handoff = prefill.admit(request, decode.reserve(request))
    prefill.run_out()
    deliver(prefill, decode, handoff)
    decode.run_out()
    assert decode.token_ids(request.key) == ANSWER[2:]


def test_token_rules_hold_from_the_first_sampled_position() -> None:
    # 1. An end token right after the log.
    decode = DecodeSide(eos=frozenset({ANSWER[7]}))
    decode.begin(with_log(7))
    decode.run_out()
    assert decode.token_ids(with_log(7).key) == ANSWER[6:8]
    assert decode.sink.tokens_of(with_log(7).key)[-1].finish_reason is FinishReason.STOP
    # 2. The ban before min_tokens counts the log.
    decode = DecodeSide(eos=frozenset({1}))
    decode.begin(with_log(7, max_tokens=10, min_tokens=8))
    decode.run_out()
    samples = [row.sample for plan in decode.runner.plans for row in plan.rows if row.sample]
    assert [sample.banned_token_ids for sample in samples] == [(1,), (), ()]
    # 3. max_tokens and the window count the log too.
    decode = DecodeSide()
    request = make_request(MAX_MODEL_LEN - 5, max_tokens=50)
    answer = expected_tokens(request.prompt_token_ids, 5)
    request = make_request(MAX_MODEL_LEN - 5, max_tokens=50, output_token_ids=tuple(answer[:4]))
    decode.begin(request)
    decode.run_out()
    assert decode.token_ids(request.key) == answer[3:]
    assert_no_leaks(decode.pool)


STATES: dict[str, Callable[[DecodeSide, GenerateRequest], object]] = {
    "committed": lambda decode, request: decode.begin(request),
    "replaying": lambda decode, request: (decode.begin(request), decode.step()),
    "replayed": lambda decode, request: (decode.begin(request), *(decode.step() for _ in range(3))),
    "sampling": lambda decode, request: (decode.begin(request), *(decode.step() for _ in range(5))),
}


@pytest.fixture(params=STATES)
def replaying(request: pytest.FixtureRequest) -> tuple[DecodeSide, GenerateRequest]:
    """A decode side that holds one sequence with a log of twelve tokens, in each state of its replay in turn."""
    decode = DecodeSide(max_replay_tokens=5)
    wanted = with_log(12)
    STATES[request.param](decode, wanted)
    return decode, wanted


def test_abort_releases_in_every_state_of_a_replay(replaying: tuple[DecodeSide, GenerateRequest]) -> None:
    decode, request = replaying
    decode.phase.abort(request.key, 1)
    assert decode.step() is None
    assert_no_leaks(decode.pool)
    with pytest.raises(Refused) as refused:
        decode.reserve(request, 1)
    assert refused.value.code is RefusalCode.STALE_ATTEMPT


def test_the_lease_ends_in_every_state_of_a_replay(replaying: tuple[DecodeSide, GenerateRequest]) -> None:
    decode, request = replaying
    decode.clock.advance(LEASE_S)
    decode.run_out()
    (failure,) = decode.sink.failures
    assert (failure.key, failure.kind) == (request.key, FailureKind.LEASE_EXPIRED)
    assert_no_leaks(decode.pool)


def test_a_failed_row_of_a_replay_costs_the_sequence(replaying: tuple[DecodeSide, GenerateRequest]) -> None:
    decode, request = replaying
    decode.runner.failing.add(request.key)
    decode.run_out()
    assert [failure.kind for failure in decode.sink.failures] == [FailureKind.INTERNAL]
    assert_no_leaks(decode.pool)


@pytest.mark.parametrize("num_logged", [0, 1, 5, 12, 19])
def test_a_retry_in_every_state_of_a_replay_starts_from_its_own_log(
    replaying: tuple[DecodeSide, GenerateRequest], num_logged: int
) -> None:
    decode, request = replaying
    decode.begin(with_log(num_logged), 2)
    decode.run_out()
    assert decode.token_ids(request.key, 2) == ANSWER[max(0, num_logged - 1) :]
    assert_no_leaks(decode.pool)


def test_a_retry_with_a_longer_log_takes_the_pages_that_lack_as_it_replays() -> None:
    decode = DecodeSide()
    decode.reserve(with_log(0))
    assert decode.pool.counts()[PageState.RESERVED] == 2
    decode.begin(with_log(15), 2)
    assert decode.pool.counts()[PageState.USED] == 2
    decode.run_out()
    assert decode.token_ids(with_log(0).key, 2) == ANSWER[14:]
    assert_no_leaks(decode.pool)


def test_the_commit_names_the_first_token_of_the_log() -> None:
    decode = DecodeSide()
    request = with_log(6)
    ticket = decode.reserve(request)
    decode.phase.accept(prompt_segments(ticket, request))
    with pytest.raises(Refused) as refused:
        decode.phase.commit(make_commit(ticket, ANSWER[5]))
    assert refused.value.code is RefusalCode.TOKEN_MISMATCH
    commit = make_commit(ticket, next_token(request.prompt_token_ids))
    decode.phase.commit(commit)
    decode.step()
    decode.phase.commit(commit)
    decode.run_out()
    decode.phase.commit(commit)
    assert decode.token_ids(request.key) == ANSWER[5:]
    assert_no_leaks(decode.pool)
