from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_engine.logit_rules import Logits
from llm_engine.philox import uniform
from llm_engine.sampler import UnusableLogits, sample
from llm_engine.step_plan import SampleSpec

GREEDY = SampleSpec(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice_index=0, output_index=0)
RANDOM = replace(GREEDY, temperature=1.0)


def logits_of(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def random_logits(seed: int, *, size: int = 3000, scale: float = 2.0, decimals: int = 8) -> Logits:
    """Few decimals give many ties."""
    return np.random.default_rng(seed).normal(scale=scale, size=size).round(decimals).astype(np.float32)


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals() -> None:
    assert sample(logits_of(0.0, 3.0, 1.0, 3.0), GREEDY).token_id == 1


def test_banned_tokens_are_never_chosen() -> None:
    logits = logits_of(5.0, 3.0, 1.0)
    assert sample(logits, replace(GREEDY, banned_token_ids=(0, 99))).token_id == 1
    for index in range(50):
        assert sample(logits, replace(RANDOM, banned_token_ids=(0, 1), output_index=index)).token_id == 2
    assert logits[0] == 5.0, "the caller's logits stay as they were"


@pytest.mark.parametrize("spec", [GREEDY, RANDOM, replace(RANDOM, top_k=1), replace(RANDOM, top_p=0.5)])
def test_all_tokens_banned_is_an_error(spec: SampleSpec) -> None:
    with pytest.raises(UnusableLogits, match="banned"):
        sample(logits_of(1.0, 2.0), replace(spec, banned_token_ids=(0, 1)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("spec", [GREEDY, RANDOM])
def test_logits_that_are_not_finite_are_an_error(bad: float, spec: SampleSpec) -> None:
    with pytest.raises(UnusableLogits, match="not finite"):
        sample(logits_of(1.0, bad, 2.0), spec)


def test_top_k_one_is_greedy() -> None:
    logits = random_logits(1, decimals=1)
    for index in range(20):
        spec = replace(RANDOM, top_k=1, temperature=2.0, output_index=index)
        assert sample(logits, spec).token_id == sample(logits, GREEDY).token_id


def test_a_tiny_top_p_keeps_the_likeliest_token() -> None:
    logits = random_logits(2)
    for index in range(20):
        spec = replace(RANDOM, top_p=1e-300, temperature=2.0, output_index=index)
        assert sample(logits, spec).token_id == sample(logits, GREEDY).token_id


def test_a_tiny_temperature_is_greedy() -> None:
    logits = logits_of(1.0, 2.0, 1.9999)
    for temperature in (1e-6, 1e-300, 5e-324):
        assert sample(logits, replace(RANDOM, temperature=temperature)).token_id == 1


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = random_logits(3)
    for index in range(50):
        spec = replace(RANDOM, output_index=index)
        assert sample(logits, replace(spec, top_k=10**9)).token_id == sample(logits, spec).token_id


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.log(probabilities).astype(np.float32)
    num_draws = 4000
    tokens = [sample(logits, replace(RANDOM, output_index=index, seed=11)).token_id for index in range(num_draws)]
    assert np.bincount(tokens, minlength=4) / num_draws == pytest.approx(probabilities, abs=0.03)


def test_top_p_cuts_to_the_shortest_head_that_holds_it() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25])).astype(np.float32)
    tokens = {sample(logits, replace(RANDOM, top_p=0.7, output_index=index)).token_id for index in range(200)}
    assert tokens == {1, 3}


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25])).astype(np.float32)
    tokens = {sample(logits, replace(RANDOM, min_p=0.29, output_index=index)).token_id for index in range(300)}
    assert tokens == {1, 2, 3}
    assert {sample(logits, replace(RANDOM, min_p=1.0, output_index=index)).token_id for index in range(20)} == {1}


def test_seed_choice_and_index_are_all_that_matters() -> None:
    logits = random_logits(4)
    spec = replace(RANDOM, seed=2**64 - 1, choice_index=3, output_index=17)
    assert sample(logits, spec) == sample(logits.copy(), spec)
    drawn = {sample(logits, replace(spec, seed=seed)).token_id for seed in range(30)}
    assert len(drawn) > 10


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0.01, 2.0),
    top_p=st.floats(0.001, 1.0),
    top_k=st.sampled_from([0, 1, 5, 511, 512, 513, 2999, 5000]),
    min_p=st.sampled_from([0.0, 1e-9, 0.01, 0.5, 1.0]),
    scale=st.sampled_from([0.0, 0.1, 2.0, 20.0]),
    decimals=st.sampled_from([0, 1, 8]),
)
def test_the_short_way_equals_sorting_everything(
    *, seed: int, temperature: float, top_p: float, top_k: int, min_p: float, scale: float, decimals: int
) -> None:
    logits = random_logits(seed, scale=scale, decimals=decimals)
    spec = replace(RANDOM, seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    assert sample(logits, spec).token_id == _by_sorting_everything(logits, spec)


def _by_sorting_everything(logits: Logits, spec: SampleSpec) -> int:
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    highest = float(logits[order[0]])
    if spec.min_p > 0.0:
        threshold = np.float32(highest + spec.temperature * np.log(spec.min_p))
        logits = np.where(logits >= threshold, logits, np.float32(-np.inf))
    weights = np.exp((logits[order].astype(np.float64) - highest) / spec.temperature)
    weights = weights[: spec.top_k] if spec.top_k else weights
    cumulative = np.cumsum(weights)
    if spec.top_k:
        mass = cumulative[-1]
    else:
        mass = np.exp((logits.astype(np.float64) - highest) / spec.temperature).sum()
    if spec.top_p < 1.0:
        mass = cumulative[min(int(np.searchsorted(cumulative, spec.top_p * mass)), len(cumulative) - 1)]
    target = uniform(seed=spec.seed, output_index=spec.output_index, choice_index=spec.choice_index) * mass
    return order[min(int(np.searchsorted(cumulative, target, side="right")), len(cumulative) - 1)]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_of(2.0, 1.0, 3.0, 3.0)
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    spec = replace(RANDOM, temperature=0.5, top_k=1, banned_token_ids=(2,), num_logprobs=3)
    token = sample(logits, spec)
    assert token.token_id == 3
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(expected[3])
    assert [token_id for token_id, _ in token.logprobs.top] == [2, 3, 0]
    assert [logprob for _, logprob in token.logprobs.top] == pytest.approx([expected[2], expected[3], expected[0]])


def test_zero_logprobs_give_only_that_of_the_token() -> None:
    token = sample(logits_of(0.0, 0.0), replace(GREEDY, num_logprobs=0))
    assert token.logprobs is not None
    assert token.logprobs.top == ()
    assert token.logprobs.logprob == pytest.approx(np.log(0.5))
    assert sample(logits_of(0.0, 0.0), GREEDY).logprobs is None
