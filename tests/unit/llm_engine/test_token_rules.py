from __future__ import annotations

import pytest

from llm_engine.token_rules import TokenRules
from serving_core.token_event import FinishReason
from tests.phases import make_request

EOS = 7
RULES = TokenRules(eos_token_ids=frozenset({EOS}), max_model_len=16)


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
    assert RULES.sample_spec(request, 0).banned_token_ids == (3,)


def test_end_tokens_are_banned_and_end_nothing_before_min_tokens() -> None:
    request = make_request(min_tokens=2, stop_token_ids=(3,))
    assert RULES.sample_spec(request, 0).banned_token_ids == (3, EOS)
    assert RULES.sample_spec(request, 1).banned_token_ids == (3, EOS)
    assert RULES.sample_spec(request, 2).banned_token_ids == ()
    assert RULES.finish_reason(request, 1, EOS) is None
    assert RULES.finish_reason(request, 2, EOS) is FinishReason.STOP


def test_a_sample_spec_is_a_function_of_request_and_place() -> None:
    request = make_request()
    spec = RULES.sample_spec(request, 3)
    assert spec == RULES.sample_spec(request, 3)
    assert spec.output_index == 3
    assert spec.seed == request.sampling.seed
