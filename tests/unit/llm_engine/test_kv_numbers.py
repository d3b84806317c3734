from __future__ import annotations

import pytest
import torch

from llm_engine.kv_numbers import dequantize, quantize, to_cache_type

BYTES = pytest.mark.parametrize("held", [torch.int8, torch.float8_e4m3fn])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_number_comes_back_within_half_a_step_of_its_heads_scale(dtype: torch.dtype) -> None:
    heads = (torch.randn(40, 3, 64) * torch.logspace(-3, 3, 40).view(40, 1, 1)).to(dtype)
    integers, scales = quantize(heads, torch.int8)
    assert integers.dtype is torch.int8
    assert torch.equal(scales, heads.float().abs().amax(-1) / 127)
    assert (integers.abs().amax(-1) == 127).all()
    errors = (dequantize(integers, scales, torch.float32) - heads.float()).abs()
    assert (errors <= scales.unsqueeze(-1) * 0.50001).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_of_eight_bits_three_hold_the_fraction(dtype: torch.dtype) -> None:
    heads = (torch.randn(40, 3, 64) * torch.logspace(-3, 3, 40).view(40, 1, 1)).to(dtype)
    numbers, scales = quantize(heads, torch.float8_e4m3fn)
    assert numbers.dtype is torch.float8_e4m3fn
    assert torch.equal(scales, heads.float().abs().amax(-1) / 448)
    exact = heads.float()
    errors = (dequantize(numbers, scales, torch.float32) - exact).abs()
    smallest_steps = 2.0**-9 * scales.unsqueeze(-1)  # between the numbers that are next to zero
    assert (errors <= torch.maximum(exact.abs() / 16, smallest_steps / 2) * 1.00001).all()


@BYTES
def test_zeros_and_the_smallest_numbers_stay_finite(held: torch.dtype) -> None:
    heads = torch.zeros(3, 4)
    heads[1] = 1e-45  # so small that its scale is zero
    heads[2, 0] = 1e-43  # so small that its scale is inexact
    back = dequantize(*quantize(heads, held), torch.float32)
    assert not back[:2].any()
    assert (back[2] - heads[2]).abs().max() < (3e-45 if held is torch.int8 else 1.1e-43)


@BYTES
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_no_number_stays_visible(poison: float, held: torch.dtype) -> None:
    heads = torch.ones(2, 4)
    heads[0, 1] = poison
    back = dequantize(*quantize(heads, held), torch.float32)
    assert back[0].isnan().all()
    assert torch.equal(back[1], heads[1])


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, 65504.0)])
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float32])
def test_what_is_beyond_a_type_becomes_its_largest_number(dtype: torch.dtype, largest: float, computed: torch.dtype) -> None:
    heads = torch.tensor([0.5, -1e6, 1e30, float("nan"), 2.0], dtype=computed)
    stored = to_cache_type(heads, dtype)
    assert stored.dtype is dtype
    back = stored.float()
    assert back[3].isnan()
    assert back[[0, 1, 2, 4]].tolist() == [0.5, -largest, largest, 2.0]


def test_what_was_computed_stays_as_it_is() -> None:
    heads = torch.tensor([1e30, -1e6, 2.0])
    to_cache_type(heads, torch.float16)
    assert torch.equal(heads, torch.tensor([1e30, -1e6, 2.0]))


def test_one_type_changes_nothing() -> None:
    heads = torch.tensor([1.5, float("inf")])
    assert to_cache_type(heads, torch.float32) is heads
