"""Random quantised weights."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_engine.weight_form import GROUP_SIZE


def random_int4(num_out: int, num_in: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [num_out, num_in], scale and zero [num_out, num_groups]."""
    q = torch.randint(0, 16, (num_out, num_in), generator=_generator(num_out), dtype=torch.uint8)
    return q, _scales(num_out, num_in), -7.5 * _scales(num_out, num_in)


def random_int8(num_out: int, num_in: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randint(-128, 128, (num_out, num_in), generator=_generator(num_out), dtype=torch.int8)
    return q, _scales(num_out, num_in) / 16, _scales(num_out, num_in)


def dequantized(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The weights by definition, [num_out, num_in], float32."""
    groups = torch.arange(q.shape[1]) // GROUP_SIZE
    return q.float() * scale[:, groups] + zero[:, groups]


def _scales(num_out: int, num_in: int) -> Tensor:
    return torch.rand(num_out, -(-num_in // GROUP_SIZE), generator=_generator(num_in)) * 0.1 + 0.01


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
