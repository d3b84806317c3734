"""Sampling where the logits lie, on the CPU: the tokens and logprobs of the reference, in any batch."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from llm_engine.cuda.device_sampler import choose_tokens
from llm_engine.packed_ids import PackedIds
from llm_engine.sampler import Choice, RowSampler, UnusableLogits
from llm_engine.step_plan import Penalties, SampledToken, SampleSpec
from serving_core.sampling_params import BANNING_BIAS

VOCAB = 1500
GREEDY = SampleSpec(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice_index=0, output_index=0)


def random_spec(chance: random.Random) -> SampleSpec:
    def ids(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(VOCAB + 20) for _ in range(count))

    penalties = Penalties(
        repetition=chance.choice((1.0, 0.7, 1.8)),
        presence=chance.choice((0.0, 1.5, -0.5)),
        frequency=chance.choice((0.0, 0.3)),
        prompt_token_ids=PackedIds.of(ids(30)),
        output_token_ids=PackedIds.of(ids(30) * 2),
    )
    return SampleSpec(
        temperature=chance.choice((0.0, 1e-6, 0.3, 1.0, 1.7)),
        top_p=chance.choice((1.0, 0.95, 0.5, 0.01)),
        top_k=chance.choice((0, 1, 2, 40, VOCAB)),
        seed=chance.randrange(2**63),
        choice_index=chance.randrange(4),
        output_index=chance.randrange(1000),
        banned_token_ids=ids(chance.choice((0, 0, 3))),
        num_logprobs=chance.choice((None, None, 0, 1, 5, 20)),
        min_p=chance.choice((0.0, 0.0, 0.05, 0.5)),
        penalties=chance.choice((None, penalties)),
        logit_bias=tuple((token_id, chance.choice((-3.0, 2.5, BANNING_BIAS))) for token_id in set(ids(chance.choice((0, 4))))),
    )


def random_logits(num_rows: int, seed: int) -> Tensor:
    """Some of them equal, as in bfloat16."""
    logits = 4.0 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return logits.bfloat16().float()


def assert_same(chosen: list[Choice], wanted: list[Choice]) -> None:
    for own, other in zip(chosen, wanted, strict=True):
        if isinstance(other, UnusableLogits):
            assert str(own) == str(other)
            continue
        assert isinstance(own, SampledToken)
        assert own.token_id == other.token_id
        assert (own.logprobs is None) == (other.logprobs is None)
        if own.logprobs is not None and other.logprobs is not None:
            assert own.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-9)
            assert [token_id for token_id, _ in own.logprobs.top] == [token_id for token_id, _ in other.logprobs.top]
            assert [value for _, value in own.logprobs.top] == pytest.approx([value for _, value in other.logprobs.top])


@pytest.mark.parametrize("seed", range(12))
def test_it_chooses_as_the_reference_does(seed: int) -> None:
    chance = random.Random(seed)
    logits = random_logits(40, seed)
    specs = [random_spec(chance) for _ in range(40)]
    before = logits.clone()
    assert_same(choose_tokens(logits, specs).wait(), RowSampler().choose(logits, specs))
    assert logits.equal(before)


def test_a_row_does_not_depend_on_the_others() -> None:
    chance = random.Random(0)
    logits, specs = random_logits(40, 0), [random_spec(chance) for _ in range(40)]
    together = choose_tokens(logits, specs).wait()
    order = chance.sample(range(40), 23)
    assert_same(choose_tokens(logits[order], [specs[row] for row in order]).wait(), [together[row] for row in order])


def test_the_lowest_of_equal_tokens_wins() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [700, 40, 1100]] = 2.0
    assert choose_tokens(logits, [GREEDY, GREEDY]).token_ids.tolist() == [0, 40]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_fails_alone(value: float, temperature: float) -> None:
    logits = random_logits(3, 0)
    logits[1, 77] = value
    specs = [replace(GREEDY, temperature=temperature, num_logprobs=3)] * 3
    assert_same(choose_tokens(logits, specs).wait(), RowSampler().choose(logits, specs))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_of_which_all_is_banned_fails_alone(temperature: float) -> None:
    logits = random_logits(2, 0)
    spec = replace(GREEDY, temperature=temperature)
    specs = [replace(spec, banned_token_ids=tuple(range(VOCAB))), spec]
    assert_same(choose_tokens(logits, specs).wait(), RowSampler().choose(logits, specs))


def test_what_it_draws_is_as_likely_as_it_should_be() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(4000, 1)
    specs = [replace(GREEDY, temperature=1.0, seed=7, output_index=index) for index in range(4000)]
    shares = np.bincount(choose_tokens(logits, specs).token_ids.numpy(), minlength=4) / 4000
    assert shares == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.025)
