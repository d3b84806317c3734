from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from llm_engine.packed_ids import PackedIds
from llm_engine.token_rules import TokenRules
from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.token_event import FinishReason
from tests.phases import NUM_TOKENS, make_request

EOS = 7
RULES = TokenRules(eos_token_ids=frozenset({EOS}), num_tokens=NUM_TOKENS, max_model_len=16)


@pytest.mark.parametrize(
    ("output_index", "token_id", "expected"),
    [
        (0, 1, None),
        (0, EOS, FinishReason.STOP),
        (3, 1, None),
        (4, 1, FinishReason.LENGTH),
        (4, EOS, FinishReason.STOP),
    ],
)
def test_end_token_before_length(output_index: int, token_id: int, expected: FinishReason | None) -> None:
    assert RULES.finish_reason(make_request(6, max_tokens=5), output_index, token_id) is expected


def test_the_window_holds_prompt_and_answer_together() -> None:
    request = make_request(14, max_tokens=9)
    assert RULES.finish_reason(request, 0, 1) is None
    assert RULES.finish_reason(request, 1, 1) is FinishReason.LENGTH
    assert RULES.max_total_tokens(request) == 16
    assert RULES.max_total_tokens(make_request(6, max_tokens=5)) == 11


def test_stop_token_ids_end_like_the_models_own() -> None:
    request = make_request(stop_token_ids=(3,))
    assert RULES.finish_reason(request, 0, 3) is FinishReason.STOP
    assert RULES.finish_reason(request, 0, EOS) is FinishReason.STOP


def test_ignore_eos_leaves_stop_token_ids_in_force() -> None:
    request = make_request(stop_token_ids=(3,), ignore_eos=True, min_tokens=1)
    assert RULES.finish_reason(request, 1, EOS) is None
    assert RULES.finish_reason(request, 1, 3) is FinishReason.STOP
    assert RULES.sample_spec(request, ()).banned_token_ids == (3,)


def test_end_tokens_are_banned_and_end_nothing_before_min_tokens() -> None:
    request = make_request(min_tokens=2, stop_token_ids=(3,))
    assert RULES.sample_spec(request, ()).banned_token_ids == (3, EOS)
    assert RULES.sample_spec(request, (1,)).banned_token_ids == (3, EOS)
    assert RULES.sample_spec(request, (1, 1)).banned_token_ids == ()
    assert RULES.finish_reason(request, 1, EOS) is None
    assert RULES.finish_reason(request, 2, EOS) is FinishReason.STOP


def request_with(**options: Any) -> GenerateRequest:
    request = make_request()
    return replace(request, sampling=replace(request.sampling, **options))


@pytest.mark.parametrize("token_id", [-1, NUM_TOKENS, 2**31])
def test_ids_that_are_no_tokens_are_refused_wherever_they_stand(token_id: int) -> None:
    good = make_request()
    bad = [
        replace(good, prompt_token_ids=(1, token_id, 2)),
        replace(good, output_token_ids=(token_id,)),
    ]
    if token_id >= 0:  # others cannot be constructed
        bad += [request_with(stop_token_ids=(3, token_id)), request_with(logit_bias=((token_id, 1.0),))]
    for request in bad:
        with pytest.raises(Refused, match=f"Token id {token_id} in the .* must be from 0 to {NUM_TOKENS - 1}") as refused:
            RULES.check_token_ids(request)
        assert refused.value.code is RefusalCode.MALFORMED


def test_every_token_may_stand_anywhere() -> None:
    last = NUM_TOKENS - 1
    request = request_with(stop_token_ids=(0, last), logit_bias=((0, 1.0), (last, 1.0)))
    RULES.check_token_ids(replace(request, prompt_token_ids=(0, last), output_token_ids=(last, 0)))


def test_a_sample_spec_is_a_function_of_the_request_and_the_answer_so_far() -> None:
    request = request_with(logit_bias=((5, -1.0),), min_p=0.1)
    spec = RULES.sample_spec(request, [4, 5, 4])
    assert spec == RULES.sample_spec(request, (4, 5, 4))
    assert spec.output_index == 3
    assert spec.seed == request.sampling.seed
    assert (spec.logit_bias, spec.min_p, spec.penalties) == (((5, -1.0),), 0.1, None)


@pytest.mark.parametrize("option", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}])
def test_penalties_see_prompt_and_answer(option: dict[str, float]) -> None:
    request = request_with(**option)
    penalties = RULES.sample_spec(request, [4, 5]).penalties
    assert penalties is not None
    assert penalties.prompt_token_ids == PackedIds.of(request.prompt_token_ids)
    assert penalties.output_token_ids == PackedIds.of((4, 5))
    assert (penalties.repetition, penalties.presence, penalties.frequency) == (
        request.sampling.repetition_penalty,
        request.sampling.presence_penalty,
        request.sampling.frequency_penalty,
    )


def test_a_template_serves_every_token_of_an_answer() -> None:
    request = request_with(frequency_penalty=0.5, min_tokens=2, stop_token_ids=(3,))
    template = RULES.sample_template(request)
    answer = array("i")
    for index, token_id in enumerate((4, 5, 4)):
        spec = template.spec(answer)
        assert spec == RULES.sample_spec(request, tuple(answer))
        assert (spec.output_index, bool(spec.banned_token_ids)) == (index, index < 2)
        answer.append(token_id)
        assert spec.penalties is not None
        assert spec.penalties.output_token_ids.numpy().tolist() == answer.tolist()[:index], "a spec stays as it was"
