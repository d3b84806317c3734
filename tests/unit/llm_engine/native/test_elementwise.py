"""What lies between the products, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from llm_engine.gated_activation import TorchGate
from llm_engine.model_config import Activation
from llm_engine.native.library import NativeLibrary
from llm_engine.rms_norm import NativeRmsNorm, RmsNorm

ROUNDING = 2**-8
SIZES = [1, 15, 16, 64, 80, 100, 576, 640]


@pytest.mark.parametrize("size", SIZES)
def test_norm(library: NativeLibrary, size: int) -> None:
    x, weight = torch.randn(7, size).bfloat16(), torch.rand(size) + 0.5
    expected = RmsNorm(weight, 1e-6)(x.double())
    torch.testing.assert_close(NativeRmsNorm(weight, 1e-6, library)(x).double(), expected, rtol=ROUNDING, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_norm_of_heads_that_lie_apart(library: NativeLibrary, size: int) -> None:
    qkv, weight = torch.randn(5, 6, size).bfloat16(), torch.rand(size) + 0.5
    for heads in torch.split(qkv, [3, 2, 1], dim=1):
        normed = NativeRmsNorm(weight, 1e-6, library)(heads)
        assert normed.shape == heads.shape
        torch.testing.assert_close(normed.double(), RmsNorm(weight, 1e-6)(heads.double()), rtol=ROUNDING, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_norm_of_a_sum(library: NativeLibrary, size: int) -> None:
    x, delta, weight = torch.randn(7, size), torch.randn(7, size).bfloat16(), torch.rand(size) + 0.5
    norm = NativeRmsNorm(weight, 1e-5, library)
    expected_total = x + delta.float()
    total, normed = norm.of_sum(x.clone(), delta)
    assert torch.equal(total, expected_total)
    assert torch.equal(normed, norm(expected_total))
    total, normed = norm.of_sum(x.clone(), None)
    assert torch.equal(total, x)
    assert torch.equal(normed, norm(x))
    torch.testing.assert_close(normed.double(), RmsNorm(weight, 1e-5)(x.double()), rtol=ROUNDING, atol=1e-5)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("size", SIZES)
def test_gated_activation(library: NativeLibrary, size: int, activation: Activation) -> None:
    gate_up = (4 * torch.randn(6, 2 * size)).bfloat16()
    gate_up[0] = torch.linspace(-200, 200, 2 * size).bfloat16()
    expected = TorchGate(activation)(gate_up.double())
    torch.testing.assert_close(library.activate_multiply(activation, gate_up).double(), expected, rtol=ROUNDING, atol=1e-6)


def test_what_is_no_number_stays_none(library: NativeLibrary) -> None:
    x = torch.ones(2, 32).bfloat16()
    x[0, 5] = float("nan")
    assert library.rms_norm(x, torch.ones(32), 1e-5).isnan().sum() == 32
    for activation in Activation:
        assert library.activate_multiply(activation, x).isnan().sum() == 1


@pytest.mark.usefixtures("two_threads")
def test_a_row_depends_on_itself_alone(library: NativeLibrary) -> None:
    x, weight = torch.randn(100, 1152).bfloat16(), torch.rand(1152)
    normed, activated = library.rms_norm(x, weight, 1e-5), library.activate_multiply(Activation.SILU, x)
    order = torch.randperm(100)[:37]
    assert torch.equal(library.rms_norm(x[order], weight, 1e-5), normed[order])
    assert torch.equal(library.activate_multiply(Activation.SILU, x[order]), activated[order])
    torch.set_num_threads(1)
    assert torch.equal(library.rms_norm(x, weight, 1e-5), normed)
    assert torch.equal(library.activate_multiply(Activation.SILU, x), activated)


def test_the_exponential_is_exact_enough(library: NativeLibrary) -> None:
    """A gate of x and up of 1 gives silu(x), which shows exp(-x) from end to end."""
    gate = torch.linspace(-90, 90, 4096).bfloat16()
    gate_up = torch.cat([gate, torch.ones(4096).bfloat16()]).unsqueeze(0)
    result = library.activate_multiply(Activation.SILU, gate_up)[0].double()
    torch.testing.assert_close(result, functional.silu(gate.double()), rtol=ROUNDING, atol=1e-30)
