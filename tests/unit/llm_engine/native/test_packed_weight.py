from __future__ import annotations

import pytest
import torch

from llm_engine.native.packed_weight import pack_bfloat16, pack_int4, pack_int8, unpack
from llm_engine.weight_form import GROUP_SIZE
from tests.unit.llm_engine.native.weights import dequantized, random_int4, random_int8

SHAPES = [(1, 1), (16, 32), (33, 70), (64, 64), (31, 96), (576, 160)]


@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_four_bits_come_back(num_out: int, num_in: int) -> None:
    q, scale, zero = random_int4(num_out, num_in)
    packed = pack_int4(q, scale, zero)
    assert torch.equal(unpack(packed), dequantized(q, scale, zero))
    assert (packed.num_out, packed.num_in) == (num_out, num_in)


@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_eight_bits_come_back(num_out: int, num_in: int) -> None:
    q, scale, zero = random_int8(num_out, num_in)
    assert torch.equal(unpack(pack_int8(q, scale, zero)), dequantized(q, scale, zero))
    assert torch.equal(unpack(pack_int8(q, scale)), dequantized(q, scale, torch.zeros_like(scale)))


@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_bfloat16_comes_back(num_out: int, num_in: int) -> None:
    weight = torch.randn(num_out, num_in).bfloat16()
    assert torch.equal(unpack(pack_bfloat16(weight)), weight.float())


def test_what_it_takes_is_counted() -> None:
    q, scale, zero = random_int4(64, 64)
    scales = 2 * 4 * 64 * 64 // GROUP_SIZE
    assert pack_int4(q, scale, zero).nbytes == 64 * 64 // 2 + scales
    assert pack_int8(q.view(torch.int8), scale).nbytes == 64 * 64 + scales
    assert pack_bfloat16(q.bfloat16()).nbytes == 64 * 64 * 2
