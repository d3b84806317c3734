"""Memory of a device as bytes that the host reads and writes, piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor


class StagedBytes:
    """``memory`` [num_bytes], uint8. Both verbs copy through pinned host memory on a stream of their own, so that they wait for
    no step under way, and return when the copy is done. They may be called from any thread."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._stream = torch.cuda.Stream(memory.device) if memory.is_cuda else None  # type: ignore[no-untyped-call]
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # what made the memory did so on another stream

    def read(self, start: int, num_bytes: int) -> memoryview:
        """A copy, which does not change any more."""
        copy = self._host_memory(num_bytes)
        self._copy(self._memory[start : start + num_bytes], copy)
        return copy.numpy().data.toreadonly()

    def write(self, start: int, payload: memoryview) -> None:
        """Put ``payload`` at ``start``."""
        copy = self._host_memory(payload.nbytes)
        copy.numpy()[:] = payload.cast("B")
        self._copy(copy, self._memory[start : start + payload.nbytes])

    def _host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._memory.is_cuda)

    def _copy(self, source: Tensor, destination: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
