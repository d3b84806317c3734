"""Kernel calls that are recorded once, then made again, for any number of tokens, without a return to Python in between: for a
step of one sequence Python takes as long as the kernels do."""

from __future__ import annotations

import ctypes
import math
import weakref
from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from llm_engine.native.calls import ReplayedCall


class Recording:
    """The calls of one computation, in order, over tensors that stay where they are and have room for ``max_tokens``.

    While it is made no kernel runs. Its own tensors are memory of a few blocks: one that nobody holds any more goes to the next
    tensor of its size, as it would if the kernels ran.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._calls: list[tuple[int, Structure]] = []
        self._blocks: dict[int, list[Tensor]] = {}
        self._replayed: Any = None

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor whose content is whatever an earlier one left."""
        num_bytes = math.prod(shape) * dtype.itemsize
        free = self._blocks.setdefault(num_bytes, [])
        if not free:
            free.append(torch.empty(num_bytes, dtype=torch.uint8))
        block = free.pop()
        memory = block.numpy()  # lives as long as the tensor and all views of it
        weakref.finalize(memory, free.append, block).atexit = False
        return torch.from_numpy(memory).view(dtype).view(shape)

    def add(self, kernel: Any, call: Structure) -> None:
        """``kernel`` is one of a loaded library's functions."""
        address = ctypes.cast(kernel, ctypes.c_void_p).value
        assert address is not None
        self._calls.append((address, call))

    def replay(self, kernel: Any, num_tokens: int) -> None:
        """Make all calls, through the kernel that does so."""
        assert 1 <= num_tokens <= self.max_tokens
        if self._replayed is None:
            calls = [ReplayedCall(address, ctypes.addressof(call)) for address, call in self._calls]
            self._replayed = (ReplayedCall * len(calls))(*calls)
        kernel(self._replayed, len(self._calls), num_tokens)
