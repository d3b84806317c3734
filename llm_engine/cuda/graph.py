"""A CUDA graph: the launches of a computation recorded once, then made by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Recorder(Protocol):
    """Turns a computation over tensors that stay where they are into one that repeats it."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]: ...


class GraphRecorder:
    """See ``Recorder``. The graphs share the memory of what is only needed within one of them, so they take turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Nothing else may use the device meanwhile."""
        # Once without recording, on another stream as torch asks: libraries compile kernels and make workspaces on first use.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            compute()
        return graph.replay
