"""Steps that begin while the one before is under way: the same tokens, and no page changes hands before its time."""

from __future__ import annotations

from functools import partial

import pytest

from llm_engine.step_plan import NOT_YET_KNOWN, StepPlan
from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey
from serving_core.page_state import PageOwner, PageState
from serving_core.token_event import FinishReason
from tests.page_audit import assert_nothing_shared_is_written, audit_decode
from tests.pages import assert_no_leaks
from tests.phases import NUM_TOKENS, DecodeSide, FakeAheadRunner, expected_tokens, make_commit, make_request
from tests.stepped_pair import SteppedLoop


class AheadSide(DecodeSide):
    """A decode worker on a device that is one step behind its host. ``planned`` has what began, ``runner.plans`` what was
    computed, in which every token is known."""

    def __init__(self, *, num_pages: int = 16, eos: frozenset[int] = frozenset(), max_replay_tokens: int = 5) -> None:
        super().__init__(num_pages=num_pages, eos=eos, max_replay_tokens=max_replay_tokens)
        self.planned: list[StepPlan] = []
        self.runner.before_run = partial(assert_nothing_shared_is_written, self.pool)
        self.loop = SteppedLoop(self._Runner(self), [self.phase], self.clock)

    class _Runner(FakeAheadRunner):
        def __init__(self, side: AheadSide) -> None:
            super().__init__(side.runner)
            self._side = side

        def run(self, plan: StepPlan):  # type: ignore[no-untyped-def]
            self._side.planned.append(plan)
            return super().run(plan)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn()
            audit_decode(self, [b""])
            self.assert_idle_means_free()

    def assert_idle_means_free(self) -> None:
        """What a worker asserts when it tells how it is."""
        status = self.phase.status()
        assert status.num_running + status.num_waiting > 0 or self.pool.num_available == self.pool.num_pages

    def num_rows(self, key: SequenceKey) -> int:
        return sum(row.key == key for plan in self.planned for row in plan.rows)


def texts(side: DecodeSide, *requests: GenerateRequest) -> list[list[int]]:
    return [side.token_ids(request.key) for request in requests]


def expected(request: GenerateRequest) -> list[int]:
    return expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)


def test_the_same_tokens_one_step_ahead() -> None:
    side = AheadSide()
    requests = [make_request(length, name=f"r{length}", max_tokens=9) for length in (1, 4, 6)]
    for request in requests:
        side.begin(request)
    side.turn(12)
    assert texts(side, *requests) == [expected(request) for request in requests]
    assert [row.token_ids for plan in side.planned[1:] for row in plan.rows] == [(NOT_YET_KNOWN,)] * 7 * 3
    assert_no_leaks(side.pool)


def test_a_step_is_under_way_while_the_next_begins() -> None:
    side = AheadSide()
    request = make_request(max_tokens=5)
    side.begin(request)
    side.turn()
    assert (len(side.planned), len(side.runner.plans)) == (1, 0)
    side.turn()
    assert (len(side.planned), len(side.runner.plans)) == (2, 1)
    assert side.token_ids(request.key) == expected(request)[:2]


def test_no_step_begins_for_a_token_beyond_the_last() -> None:
    side = AheadSide()
    request = make_request(max_tokens=4)
    side.begin(request)
    side.turn(8)
    assert side.num_rows(request.key) == 3  # prefill computed the first token
    assert side.sink.tokens_of(request.key)[-1].finish_reason is FinishReason.LENGTH


def test_an_end_that_nobody_knew_of_drops_what_runs_ahead() -> None:
    request = make_request(max_tokens=20)
    end = expected(request)[3]
    side = AheadSide(eos=frozenset({end}))
    side.begin(request)
    side.turn(8)
    assert side.token_ids(request.key) == expected(request)[:4]
    assert side.sink.tokens_of(request.key)[-1].finish_reason is FinishReason.STOP
    assert side.num_rows(request.key) == 4
    assert side.phase.counters.num_generation_tokens == 3
    assert_no_leaks(side.pool)


def test_whose_next_token_needs_the_last_misses_a_step_and_the_others_do_not() -> None:
    side = AheadSide()
    quick = make_request(name="quick", max_tokens=12)
    penalised = make_request(name="penalised", max_tokens=12, repetition_penalty=1.5)
    for request in (quick, penalised):
        side.begin(request)
    side.turn(6)
    assert (side.num_rows(quick.key), side.num_rows(penalised.key)) == (6, 3)
    side.turn(20)
    assert texts(side, quick, penalised) == [expected(quick), expected(penalised)]
    outputs = [
        row.sample.penalties.output_token_ids.numpy().tolist()
        for plan in side.planned
        for row in plan.rows
        if row.sample is not None and row.sample.penalties is not None
    ]
    assert outputs == [expected(penalised)[:length] for length in range(1, 12)]


@pytest.mark.parametrize("num_turns", range(5))
def test_pages_that_a_step_writes_are_nobody_elses_until_it_is_over(num_turns: int) -> None:
    side = AheadSide(num_pages=4)
    leaving = make_request(7, name="leaving", max_tokens=9)
    side.begin(leaving)
    side.turn(num_turns)
    side.phase.abort(leaving.key, 1)
    num_under_way = min(num_turns, 1)
    assert side.pool.num_available == 4 - num_under_way
    side.assert_idle_means_free()
    answers = side.ask(make_request(14, name="large", max_tokens=2))  # which needs all there are
    assert len(answers) == 1 - num_under_way
    side.turn(2)  # it is over, then they are given out
    assert len(answers) == 1
    assert side.sink.failures == []
    side.phase.abort(SequenceKey(make_request(name="large").key.request_id), 1)
    assert_no_leaks(side.pool)


@pytest.mark.parametrize("num_turns", range(5))
def test_a_retry_meets_a_step_under_way(num_turns: int) -> None:
    side = AheadSide()
    request = make_request(7, max_tokens=9)
    old = side.begin(request)
    side.turn(num_turns)
    side.begin(request, attempt=2)
    with pytest.raises(Refused) as refused:
        side.phase.commit(make_commit(old, NUM_TOKENS - 1))
    # how an attempt ended is remembered: a wrong token for it is known for one
    assert refused.value.code is (RefusalCode.TOKEN_MISMATCH if num_turns else RefusalCode.STALE_ATTEMPT)
    side.turn(12)
    assert side.token_ids(request.key, attempt=2) == expected(request)
    assert_no_leaks(side.pool)


def test_a_replayed_log_goes_over_into_steps_ahead() -> None:
    text = expected(make_request(max_tokens=20))
    request = make_request(max_tokens=20, output_token_ids=tuple(text[:8]))
    side = AheadSide(max_replay_tokens=3)
    side.begin(request)
    side.turn(20)
    assert side.token_ids(request.key) == text[7:]
    assert [len(plan.rows[0].token_ids) for plan in side.planned[:4]] == [3, 3, 2, 1]
    assert side.planned[3].rows[0].is_ahead


def test_a_row_that_fails_takes_what_runs_ahead_along() -> None:
    side = AheadSide()
    bad, good = make_request(name="bad", max_tokens=9), make_request(name="good", max_tokens=9)
    side.begin(bad)
    side.begin(good)
    side.turn(3)
    side.runner.failing.add(bad.key)
    side.turn(12)
    assert [failed.key for failed in side.sink.failures] == [bad.key]
    assert side.token_ids(bad.key) == expected(bad)[: len(side.token_ids(bad.key))]
    assert side.token_ids(good.key) == expected(good)
    assert_no_leaks(side.pool)


def test_an_eviction_takes_what_runs_ahead_along() -> None:
    side = AheadSide(num_pages=5)
    old, young = make_request(7, name="old", max_tokens=12), make_request(7, name="young", max_tokens=5)
    side.begin(old)
    side.begin(young)
    side.turn(20)
    assert [event.key for event in side.sink.evictions] == [young.key]
    assert side.token_ids(old.key) == expected(old)
    assert side.token_ids(young.key) == expected(young)[: len(side.token_ids(young.key))]
    assert_no_leaks(side.pool)


def test_of_those_in_a_step_one_is_evicted_at_a_time() -> None:
    side = AheadSide()
    old = make_request(3, name="old", max_tokens=8)  # the first to need a second page
    neighbour = PageOwner(key=SequenceKey(RequestId("neighbour")), attempt=1)
    others = [make_request(1, name=name, max_tokens=3) for name in ("other", "youngest")]
    for request in (old, *others):
        side.begin(request)
    side.loop.turn()
    taken = side.pool.allocate(side.pool.num_available, neighbour, PageState.USED)
    for _ in range(12):
        side.loop.turn()  # the audit knows no neighbour
    assert [event.key for event in side.sink.evictions] == [others[-1].key]
    assert texts(side, old, others[0]) == [expected(old), expected(others[0])]
    side.pool.release(taken, neighbour)
    assert_no_leaks(side.pool)
