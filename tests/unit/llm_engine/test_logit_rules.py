"""Penalties, biases and bans, each against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.logit_rules import Logits, apply_logit_rules
from llm_engine.packed_ids import PackedIds
from llm_engine.sampler import sample
from llm_engine.step_plan import Penalties, SampleSpec

GREEDY = SampleSpec(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice_index=0, output_index=0)
NONE = Penalties(
    repetition=1.0,
    presence=0.0,
    frequency=0.0,
    prompt_token_ids=PackedIds.of((0, 1, 1)),
    output_token_ids=PackedIds.of((2, 2, 3)),
)


def logits_of(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def changed(
    logits: Logits, penalties: Penalties | None = None, *, logit_bias: tuple[tuple[int, float], ...] = ()
) -> list[float]:
    spec = replace(GREEDY, penalties=penalties, logit_bias=logit_bias)
    return [float(value) for value in apply_logit_rules(logits, spec)]


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = logits_of(5.0, 5.0, 5.0, 5.0, 5.0)
    assert changed(logits, replace(NONE, presence=1.5)) == [5.0, 5.0, 3.5, 3.5, 5.0]
    assert changed(logits, replace(NONE, frequency=0.5)) == [5.0, 5.0, 4.0, 4.5, 5.0]
    assert changed(logits, replace(NONE, presence=-1.0, frequency=-0.5)) == [5.0, 5.0, 7.0, 6.5, 5.0]


def test_repetition_weakens_what_prompt_or_answer_hold_once_however_often() -> None:
    logits = logits_of(4.0, -4.0, 2.0, 0.0, 3.0)
    assert changed(logits, replace(NONE, repetition=2.0)) == [2.0, -8.0, 1.0, 0.0, 3.0]
    assert changed(logits, replace(NONE, repetition=0.5)) == [8.0, -2.0, 4.0, 0.0, 3.0]


def test_repetition_comes_first_then_the_others_then_the_bias() -> None:
    penalties = replace(NONE, repetition=2.0, presence=1.0, frequency=0.25)
    assert changed(logits_of(0.0, 0.0, 8.0, 0.0), penalties, logit_bias=((2, 10.0),))[2] == 8.0 / 2 - 1.0 - 0.5 + 10.0


def test_a_bias_of_minus_100_bans_whatever_the_logit() -> None:
    logits = logits_of(1000.0, 1.0, -1000.0)
    assert changed(logits, logit_bias=((0, -100.0), (2, -99.5))) == [-np.inf, 1.0, -1099.5]
    for temperature in (0.0, 2.0):
        spec = replace(GREEDY, temperature=temperature, logit_bias=((0, -100.0),))
        assert sample(logits, spec).token_id == 1


def test_a_bias_of_100_decides_between_usual_logits() -> None:
    assert sample(logits_of(30.0, 20.0, -10.0), replace(GREEDY, logit_bias=((2, 100.0),))).token_id == 2


def test_a_ban_stays_whatever_the_bias() -> None:
    spec = replace(GREEDY, logit_bias=((0, 100.0),), banned_token_ids=(0,))
    assert sample(logits_of(1.0, 0.0), spec).token_id == 1


def test_logprobs_are_those_of_the_model() -> None:
    spec = replace(GREEDY, logit_bias=((0, -100.0),), penalties=replace(NONE, presence=2.0), num_logprobs=3)
    token = sample(logits_of(0.0, 0.0, 0.0, 0.0), spec)
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(np.log(0.25))
    assert [token_id for token_id, _ in token.logprobs.top] == [0, 1, 2]


def test_ids_beyond_the_row_are_passed_over_and_the_row_itself_is_left_alone() -> None:
    logits = logits_of(1.0, 2.0)
    penalties = replace(NONE, repetition=2.0, presence=1.0, output_token_ids=PackedIds.of((1, 99)))
    assert changed(logits, penalties, logit_bias=((7, 100.0),)) == [0.5, 0.0]
    beyond = replace(NONE, repetition=2.0, prompt_token_ids=PackedIds.of((9,)), output_token_ids=PackedIds.of(()))
    assert changed(logits, beyond) == [1.0, 2.0]
    assert logits.tolist() == [1.0, 2.0]


def test_huge_logits_stay_finite() -> None:
    largest = float(np.finfo(np.float32).max)
    penalties = replace(NONE, repetition=0.01, presence=-2.0)
    assert changed(logits_of(largest, -largest, largest), penalties)[::2] == [largest, largest]


ids = st.lists(st.integers(0, 19), max_size=30).map(tuple)


@given(
    seed=st.integers(0, 2**32),
    prompt=ids,
    output=ids,
    repetition=st.floats(0.01, 100.0),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_penalties_follow_the_definition_token_by_token(
    *, seed: int, prompt: tuple[int, ...], output: tuple[int, ...], repetition: float, presence: float, frequency: float
) -> None:
    logits = np.random.default_rng(seed).normal(scale=4.0, size=20).astype(np.float32)
    penalties = Penalties(
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        prompt_token_ids=PackedIds.of(prompt),
        output_token_ids=PackedIds.of(output),
    )
    expected = []
    for token_id, logit in enumerate(map(float, logits)):
        value = logit
        if token_id in prompt or token_id in output:
            value = value / repetition if value > 0 else value * repetition
        count = output.count(token_id)
        expected.append(value - frequency * count - (presence if count else 0.0))
    assert changed(logits, penalties) == pytest.approx(expected, rel=1e-5, abs=1e-5)
