"""Tensors in the memory for weights."""

from __future__ import annotations

import torch

from llm_engine.weight_memory import WeightMemory


def test_it_copies() -> None:
    memory = WeightMemory()
    tensors = [
        torch.randn(3, 5),
        torch.randint(256, (7, 2, 11), dtype=torch.uint8),
        torch.randint(256, (48, 2**20), dtype=torch.uint8),
        torch.randint(256, (80, 2**20), dtype=torch.uint8),
        torch.randn(0, 4),
        torch.randn(33).bfloat16(),
        torch.randn(4, 6).T,
    ]
    copies = [memory.copy(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype is tensor.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
        assert torch.equal(copy, tensor)


def test_small_ones_lie_side_by_side() -> None:
    memory = WeightMemory()
    first, second = memory.copy(torch.ones(100, dtype=torch.uint8)), memory.copy(torch.ones(100, dtype=torch.uint8))
    assert second.data_ptr() == first.data_ptr() + 128
