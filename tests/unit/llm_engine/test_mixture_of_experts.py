from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from llm_engine.feed_forward import FeedForward
from llm_engine.gated_activation import TorchGate
from llm_engine.linear import Linear
from llm_engine.mixture_of_experts import MixtureOfExperts
from llm_engine.model_config import Activation

HIDDEN, SIZE, NUM_EXPERTS, NUM_CHOSEN = 96, 80, 8, 3


def experts(dtype: torch.dtype, *, is_normalized: bool = True) -> MixtureOfExperts:
    generator = torch.Generator().manual_seed(0)

    def linear(num_out: int, num_in: int) -> Linear:
        return Linear((torch.randn(num_out, num_in, generator=generator) / num_in**0.5).to(dtype))

    return MixtureOfExperts(
        router=linear(NUM_EXPERTS, HIDDEN),
        experts=tuple(
            FeedForward(gate_up=linear(2 * SIZE, HIDDEN), down=linear(HIDDEN, SIZE), activation=TorchGate(Activation.SILU))
            for _ in range(NUM_EXPERTS)
        ),
        num_chosen=NUM_CHOSEN,
        is_normalized=is_normalized,
    )


def tokens(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_each_token_gets_the_weighted_sum_of_its_experts(*, is_normalized: bool) -> None:
    mixture, x = experts(torch.float32, is_normalized=is_normalized), tokens(20, torch.float32)
    for token, result in zip(x, mixture(x), strict=True):
        probabilities = mixture.router(token).softmax(0)
        chosen = probabilities.argsort(descending=True)[:NUM_CHOSEN].tolist()
        total = probabilities[chosen].sum() if is_normalized else torch.tensor(1.0)
        expected = torch.zeros(HIDDEN)
        for index in chosen:
            gate, up = mixture.experts[index].gate_up(token).chunk(2)
            expected += probabilities[index] / total * mixture.experts[index].down(functional.silu(gate) * up)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_tokens_change_no_bit(dtype: torch.dtype) -> None:
    mixture, x = experts(dtype), tokens(132, dtype)
    whole = mixture(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.equal(mixture(x[order]), whole[order])
    for count in (4, 8, 36, 100):
        assert torch.equal(mixture(x[:count]), whole[:count])
        assert torch.equal(mixture(x[-count:]), whole[-count:])
    twins = x[:1].expand(64, -1)
    assert torch.equal(mixture(twins), whole[:1].expand(64, -1)), "experts that everybody chooses"
