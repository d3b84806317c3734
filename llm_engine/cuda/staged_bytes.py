"""Memory of a device as bytes that the host reads and writes, piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor


class StagedBytes:
    """``memory`` is uint8; its parts are views of it. Both verbs copy through pinned host memory on a stream of their own, so
    that they wait for no step under way, and return when the copy is done. They may be called from any thread."""

    def __init__(self, memory: Tensor) -> None:
        self._is_pinned = memory.is_cuda
        self._stream = torch.cuda.Stream(memory.device) if memory.is_cuda else None  # type: ignore[no-untyped-call]
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # what made the memory did so on another stream

    def read(self, part: Tensor) -> memoryview:
        """A copy of ``part`` [num_bytes], which does not change any more."""
        copy = self._host_memory(part.numel())
        self._copy(part, copy)
        return copy.numpy().data.toreadonly()

    def write(self, part: Tensor, payload: memoryview) -> None:
        """Fill ``part``, of any shape and strides, with as many bytes of ``payload``."""
        copy = self._host_memory(part.numel())
        copy.numpy()[:] = payload.cast("B")
        self._copy(copy.view(part.shape), part)

    def _host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)

    def _copy(self, source: Tensor, destination: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
