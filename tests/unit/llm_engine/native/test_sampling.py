"""The native sampler against the reference, row by row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llm_engine.native.library import NativeLibrary
from llm_engine.native_sampler import NativeSampler
from llm_engine.packed_ids import PackedIds
from llm_engine.sampler import Choice, RowSampler, UnusableLogits
from llm_engine.step_plan import Penalties, SampledToken, SampleSpec

GREEDY = SampleSpec(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice_index=0, output_index=0)
RANDOM = replace(GREEDY, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def native(library: NativeLibrary) -> NativeSampler:
    return NativeSampler(library)


def assert_as_reference(native: NativeSampler, logits: Tensor, specs: list[SampleSpec]) -> list[Choice]:
    """All rows together, each as the reference has it; and each alone, to the last bit."""
    before = logits.clone()
    choices = native.choose(logits, specs)
    assert torch.equal(logits, before) or not torch.isfinite(logits).all()
    for index, (choice, expected) in enumerate(zip(choices, RowSampler().choose(logits, specs), strict=True)):
        (alone,) = native.choose(logits[index : index + 1], specs[index : index + 1])
        if isinstance(choice, UnusableLogits):
            assert str(choice) == str(expected) == str(alone)
            continue
        assert choice == alone
        assert isinstance(expected, SampledToken)
        assert choice.token_id == expected.token_id, specs[index]
        assert (choice.logprobs is None) == (expected.logprobs is None)
        if choice.logprobs is not None and expected.logprobs is not None:
            assert choice.logprobs.logprob == pytest.approx(expected.logprobs.logprob, rel=1e-12, abs=1e-12)
            assert [token for token, _ in choice.logprobs.top] == [token for token, _ in expected.logprobs.top]
            of_top = [logprob for _, logprob in expected.logprobs.top]
            assert [logprob for _, logprob in choice.logprobs.top] == pytest.approx(of_top, rel=1e-12, abs=1e-12)
    return choices


def token_ids(size: int) -> st.SearchStrategy[PackedIds]:
    """Some lie beyond the vocabulary."""
    return st.lists(st.integers(0, size + 3), max_size=40).map(PackedIds.of)


@st.composite
def spec_of(draw: st.DrawFn, size: int) -> SampleSpec:
    penalties = st.builds(
        Penalties,
        repetition=st.sampled_from([0.5, 1.0, 1.3]),
        presence=st.sampled_from([-2.0, 0.0, 0.7]),
        frequency=st.sampled_from([-0.3, 0.0, 1.1]),
        prompt_token_ids=token_ids(size),
        output_token_ids=token_ids(size),
    )
    biased = draw(st.lists(st.integers(0, size + 3), max_size=20, unique=True))
    return SampleSpec(
        temperature=draw(st.sampled_from([0.0, 5e-324, 0.01, 0.7, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-300])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 50, 700, 2999, 10**9])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice_index=draw(st.integers(0, 3)),
        output_index=draw(st.integers(0, 10**6)),
        banned_token_ids=draw(st.lists(st.integers(0, size + 3), max_size=3).map(tuple)),
        num_logprobs=draw(st.sampled_from([None, 0, 1, 20])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-9, 0.05, 1.0])),
        penalties=draw(st.none() | penalties),
        logit_bias=tuple((token, draw(st.sampled_from([-100.0, -99.0, 0.0, 3.5, 100.0]))) for token in biased),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[SampleSpec]]:
    size = draw(st.sampled_from([1, 7, 16, 250, 3000, 9001]))
    num_rows = draw(st.integers(1, 6))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    scales = [draw(st.sampled_from([0.0, 0.1, 2.0, 20.0])) for _ in range(num_rows)]
    decimals = draw(st.sampled_from([0, 1, 8]))  # few decimals: many ties
    logits = np.stack([numbers.normal(scale=scale, size=size).round(decimals) for scale in scales]).astype(np.float32)
    for row in range(num_rows):
        bad = draw(st.sampled_from([None] * 8 + [np.nan, np.inf, -np.inf]))
        if bad is not None:
            logits[row, draw(st.integers(0, size - 1))] = bad
    return torch.from_numpy(logits), [draw(spec_of(size)) for _ in range(num_rows)]


@settings(max_examples=400, deadline=None)
@given(batch=batches())
def test_each_row_is_as_the_reference_has_it_whatever_the_batch(
    native: NativeSampler, batch: tuple[Tensor, list[SampleSpec]]
) -> None:
    assert_as_reference(native, *batch)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(native: NativeSampler, bad: float) -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1))
    logits[1, 2999] = bad
    logits[3, 0] = bad
    choices = assert_as_reference(native, logits, [RANDOM] * 5)
    assert [isinstance(choice, UnusableLogits) for choice in choices] == [False, True, False, True, False]


def test_a_row_whose_tokens_are_all_banned_fails_alone(native: NativeSampler) -> None:
    logits = torch.zeros(2, 3)
    for spec in (GREEDY, RANDOM):
        choices = native.choose(logits, [replace(spec, banned_token_ids=(0, 1, 2)), spec])
        assert str(choices[0]) == "every token is banned"
        assert isinstance(choices[1], SampledToken)


def test_a_flat_row_is_drawn_from_whole(native: NativeSampler) -> None:
    logits = torch.zeros(1, 60_000)
    specs = [replace(RANDOM, output_index=index) for index in range(200)]
    choices = native.choose(logits.expand(200, -1).contiguous(), specs)
    assert choices == RowSampler().choose(logits.expand(200, -1), specs)
    tokens = [choice.token_id for choice in choices if isinstance(choice, SampledToken)]
    assert min(tokens) < 3_000
    assert max(tokens) > 57_000


@pytest.mark.usefixtures("two_threads")
def test_threads_change_nothing(native: NativeSampler) -> None:
    logits = torch.randn(9, 20_000, generator=torch.Generator().manual_seed(2)) * 4
    specs = [replace(RANDOM, output_index=index, top_p=0.95, num_logprobs=5) for index in range(9)]
    together = native.choose(logits, specs)
    torch.set_num_threads(1)
    assert together == native.choose(logits, specs)
