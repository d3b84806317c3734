"""Where a worker computes: its first CUDA device, or the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

CPU = torch.device("cpu")

_log = logging.getLogger(__name__)


def compute_device() -> torch.device:
    """The first CUDA device that this process may see, where its torch can use all of them, else the CPU."""
    return torch.device("cuda", 0) if num_usable_gpus() > 0 else CPU


def num_usable_gpus() -> int:
    """CUDA devices that this process may see. 0 where torch has no kernels for one of them, which the log says in one line."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    built = torch.cuda.get_arch_list() if num_gpus else []
    for index in range(num_gpus):
        major, minor = torch.cuda.get_device_capability(index)
        if not runs_on(built, major, minor):
            name = torch.cuda.get_device_name(index)
            _log.warning(
                "CPUs compute: torch %s has no kernels for %s (compute capability %d.%d)", torch.__version__, name, major, minor
            )
            return 0
    return num_gpus


def runs_on(built: Iterable[str], major: int, minor: int) -> bool:
    """Whether any of ``built``, names like sm_86, runs on a device of this compute capability. Machine code (sm) runs on its
    major version from its minor version on, PTX (compute) on every later device too; with an "a" both run on that device alone,
    with an "f" on its major version."""
    capability = 10 * major + minor
    for name in built:
        kind, _, version = name.partition("_")
        if not version.rstrip("af").isdecimal():  # AMD's
            continue
        needed = int(version.rstrip("af"))
        is_of_family = needed // 10 == major or (kind == "compute" and not version.endswith("f"))
        if needed == capability or (needed < capability and is_of_family and not version.endswith("a")):
            return True
    return False


def to_host(tensor: Tensor) -> Tensor:
    """The numbers in host memory: the tensor itself on the CPU, else a copy in pinned memory, once they are computed."""
    if tensor.device == CPU:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    settle(tensor.device)
    return copy


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The numbers of ``tensor``, which is in host memory, on ``device``. Waits for nothing that the device computes, as a copy
    from memory that is not pinned would."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Copies in host memory of what a device has yet to compute."""

    def __init__(self, tensors: Sequence[Tensor], event: torch.cuda.Event | None) -> None:
        self._tensors = tensors
        self._event = event

    @classmethod
    def begin(cls, tensors: Sequence[Tensor]) -> HostCopies:
        """Of tensors on one device, as they will be when it has done what it was asked for until now. Waits for nothing."""
        if tensors[0].device.type != "cuda":
            return cls([tensor.clone() for tensor in tensors], None)
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(tensors[0].device))
        return cls(copies, event)

    def wait(self) -> Sequence[Tensor]:
        """The numbers, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def settle(device: torch.device) -> None:
    """Wait until all that was asked of ``device`` on this thread is done."""
    if device != CPU:
        torch.cuda.current_stream(device).synchronize()
