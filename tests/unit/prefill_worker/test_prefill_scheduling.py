"""Admission, chunks under the token budget, order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llm_engine.step_plan import StepPlan
from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.page_state import PageState
from serving_core.transfer_ticket import TransferTicket
from tests.pages import assert_no_leaks
from tests.phases import LAYOUT, MAX_MODEL_LEN, NUM_TOKENS, DecodeSide, FakeHandoff, PrefillSide, make_request, next_token


def code_of(call: Callable[[], object]) -> RefusalCode:
    with pytest.raises(Refused) as refused:
        call()
    assert str(refused.value).endswith(".")
    return refused.value.code


def start(prefill: PrefillSide, request: GenerateRequest, attempt: int = 1) -> FakeHandoff:
    return prefill.admit(request, DecodeSide(num_pages=64).reserve(request, attempt))


def chunks(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """(request, first position, number of tokens) of each row."""
    assert plan is not None
    return [(row.key.request_id, row.start_position, len(row.token_ids)) for row in plan.rows]


def test_a_long_prompt_is_cut_at_the_budget_and_short_ones_share_a_step() -> None:
    prefill = PrefillSide(max_num_batched_tokens=8)
    for name, num_tokens in (("long", 19), ("b", 3), ("c", 4)):
        start(prefill, make_request(num_tokens, name=name))
    assert chunks(prefill.step()) == [("long", 0, 8)]
    assert chunks(prefill.step()) == [("long", 8, 8)]
    assert chunks(prefill.step()) == [("long", 16, 3), ("b", 0, 3), ("c", 0, 2)]
    assert chunks(prefill.step()) == [("c", 2, 2)]
    assert prefill.step() is None
    assert prefill.phase.counters.num_prompt_tokens == 26


def test_no_more_prompts_than_max_num_seqs_share_a_step() -> None:
    prefill = PrefillSide(max_num_batched_tokens=8, max_num_seqs=2)
    for name, num_tokens in (("a", 1), ("b", 9), ("c", 1), ("d", 1)):
        start(prefill, make_request(num_tokens, name=name))
    assert chunks(prefill.step()) == [("a", 0, 1), ("b", 0, 7)]
    assert chunks(prefill.step()) == [("b", 7, 2), ("c", 0, 1)]
    assert chunks(prefill.step()) == [("d", 0, 1)]
    assert prefill.step() is None


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 8, 30])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9])
def test_chunk_borders_change_nothing(budget: int, num_tokens: int) -> None:
    prefill = PrefillSide(max_num_batched_tokens=budget)
    request = make_request(num_tokens)
    handoff = start(prefill, request)
    prefill.run_out()
    assert handoff.commit is not None
    assert handoff.commit.token_id == next_token(request.prompt_token_ids)
    assert [ordinal for ordinal, _ in handoff.pages] == list(range(LAYOUT.num_pages_for(num_tokens)))


def test_only_the_last_chunk_is_sampled_from_and_rows_name_the_pages_they_need() -> None:
    prefill = PrefillSide(max_num_batched_tokens=5)
    start(prefill, make_request(11, min_tokens=1, stop_token_ids=(3,)))
    prefill.run_out()
    rows = [plan.rows[0] for plan in prefill.runner.plans]
    assert [row.sample is None for row in rows] == [True, True, False]
    assert [len(row.page_ids) for row in rows] == [2, 3, 3]
    assert rows[-1].sample is not None
    assert rows[-1].sample.output_index == 0
    assert rows[-1].sample.banned_token_ids == (3,)


def test_full_pages_are_offered_while_the_rest_is_computed() -> None:
    prefill = PrefillSide(max_num_batched_tokens=5)
    handoff = start(prefill, make_request(11))
    offered = []
    while prefill.step() is not None:
        offered.append(len(handoff.pages))
    assert offered == [1, 2, 3]


def test_pages_come_with_the_start_and_for_the_whole_prompt() -> None:
    prefill = PrefillSide(max_num_batched_tokens=4)
    start(prefill, make_request(11, name="a"))
    start(prefill, make_request(5, name="b"))
    assert prefill.pool.num_available == 16
    assert prefill.phase.status().num_waiting == 2
    prefill.step()
    assert prefill.pool.counts()[PageState.USED] == 3
    assert prefill.phase.status().num_waiting == 1


def test_a_prompt_that_lacks_pages_waits_and_is_not_overtaken() -> None:
    prefill = PrefillSide(num_pages=4, max_num_batched_tokens=100)
    # 1. The first prompt takes three of four pages, the second wants four, the third would fit.
    handoff = start(prefill, make_request(12, name="a"))
    start(prefill, make_request(16, name="large"))
    start(prefill, make_request(3, name="small"))
    assert chunks(prefill.step()) == [("a", 0, 12)]
    assert prefill.step() is None
    # 2. Decode acknowledges the first.
    prefill.end_handoff(handoff, None)
    assert chunks(prefill.step()) == [("large", 0, 16)]
    assert prefill.step() is None
    # 3. The large one is aborted; its hand-off lets go.
    prefill.phase.abort(make_request(name="large").key, 1)
    prefill.close_cancelled()
    assert chunks(prefill.step()) == [("small", 0, 3)]


def test_what_can_never_fit_is_refused_at_once() -> None:
    prefill = PrefillSide(num_pages=2)
    assert code_of(lambda: start(prefill, make_request(9))) is RefusalCode.TOO_LARGE
    prefill = PrefillSide(num_pages=64)
    request = make_request(MAX_MODEL_LEN)
    ticket = replace(DecodeSide().reserve(make_request(6)), num_prompt_tokens=MAX_MODEL_LEN)
    assert code_of(lambda: prefill.admit(request, ticket)) is RefusalCode.TOO_LARGE
    assert prefill.phase.counters.refusals == {RefusalCode.TOO_LARGE: 1}
    assert_no_leaks(prefill.pool)


@pytest.mark.parametrize("change", [{"prompt_token_ids": (1, 2**31)}, {"output_token_ids": (NUM_TOKENS,)}])
def test_ids_that_are_no_tokens_are_refused_at_once(change: dict[str, tuple[int, ...]]) -> None:
    prefill = PrefillSide()
    request = make_request(2)
    ticket = DecodeSide().reserve(request)
    assert code_of(lambda: prefill.admit(replace(request, **change), ticket)) is RefusalCode.MALFORMED  # type: ignore[arg-type]
    assert prefill.step() is None
    assert_no_leaks(prefill.pool)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"num_prompt_tokens": 7}, RefusalCode.MALFORMED),
        ({"key": make_request(name="other").key}, RefusalCode.MALFORMED),
    ],
)
def test_a_ticket_of_something_else_is_refused(change: dict[str, object], code: RefusalCode) -> None:
    ticket: TransferTicket = replace(DecodeSide().reserve(make_request(6)), **change)  # type: ignore[arg-type]
    prefill = PrefillSide()
    assert code_of(lambda: prefill.admit(make_request(6), ticket)) is code
    assert prefill.step() is None


def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_holds() -> None:
    prefill = PrefillSide()
    held = start(prefill, make_request(name="held"))
    prefill.phase.drain()
    assert code_of(lambda: start(prefill, make_request(name="new"))) is RefusalCode.DRAINING
    assert start(prefill, make_request(name="held")).has_ended  # the repeated Start is no new work
    prefill.run_out()
    prefill.end_handoff(held, None)
    assert prefill.phase.status().num_running == 0
    assert_no_leaks(prefill.pool)
