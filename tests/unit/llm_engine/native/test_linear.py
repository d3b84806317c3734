"""Products with packed weights against float64, and each row's independence of the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm_engine.native.library import NativeLibrary
from llm_engine.native.packed_weight import PackedWeight, pack_bfloat16, pack_int4, pack_int8, unpack
from llm_engine.weight_form import WeightForm
from tests.unit.llm_engine.native.weights import random_int4, random_int8


def random_weight(form: WeightForm, num_out: int, num_in: int) -> PackedWeight:
    match form:
        case WeightForm.INT4:
            return pack_int4(*random_int4(num_out, num_in))
        case WeightForm.INT8:
            return pack_int8(*random_int8(num_out, num_in))
        case WeightForm.BFLOAT16:
            return pack_bfloat16((torch.randn(num_out, num_in) / 4).bfloat16())


def random_rows(num_rows: int, num_in: int) -> Tensor:
    return torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(num_in)).bfloat16()


@pytest.mark.parametrize("form", list(WeightForm))
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (5, 33), (32, 32), (70, 96), (960, 576), (100, 1536)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_multiplies(library: NativeLibrary, form: WeightForm, num_out: int, num_in: int, *, has_bias: bool) -> None:
    weight = random_weight(form, num_out, num_in)
    bias = torch.randn(num_out) if has_bias else None
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 32):
        x = random_rows(num_rows, num_in)
        expected = x.double() @ unpack(weight).double().T + (0 if bias is None else bias)
        torch.testing.assert_close(library.linear(x, weight, bias).double(), expected, rtol=2**-8, atol=1e-4 * num_in**0.5)
        wide = library.linear(x, weight, bias, torch.float32)
        torch.testing.assert_close(wide.double(), expected, rtol=2**-16, atol=1e-4 * num_in**0.5)
        assert torch.equal(wide.bfloat16(), library.linear(x, weight, bias))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("form", list(WeightForm))
def test_a_row_depends_on_itself_alone(library: NativeLibrary, form: WeightForm) -> None:
    weight, x = random_weight(form, 200, 608), random_rows(33, 608)
    whole = library.linear(x, weight, None)
    for num_rows in (1, 2, 3, 5, 6, 7, 12, 20):
        assert torch.equal(library.linear(x[:num_rows].contiguous(), weight, None), whole[:num_rows])
    order = torch.randperm(33)
    assert torch.equal(library.linear(x[order], weight, None), whole[order])
    torch.set_num_threads(1)
    assert torch.equal(library.linear(x, weight, None), whole)
