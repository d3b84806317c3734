"""Whether what a worker is about to put on its device fits there, beside what other workers put there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from serving_core.errors import ConfigError

_GIB = 2**30


def limit_to_share(device: torch.device, share: float) -> None:
    """Keep this process to ``share`` (0 to 1) of a CUDA device's memory, since the others of the device begin with as much."""
    torch.cuda.set_per_process_memory_fraction(share, device)


@contextmanager
def room_for(device: torch.device, num_bytes: int, what: str, way_out: str) -> Iterator[None]:
    """Put ``what``, of ``num_bytes``, on ``device`` within. Raises ConfigError, which ends with ``way_out``, when that is more
    than a CUDA device has left for this process: before, or once memory runs out, as when others have taken it meanwhile."""
    if device.type == "cuda":
        left = _bytes_left(device)
        if num_bytes > left:
            raise ConfigError(f"{what} {num_bytes / _GIB:.1f} GiB, but {_left(device, left)}: {way_out}.")
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{what} more than there is: {_left(device, _bytes_left(device))}; {way_out}.") from error


def _bytes_left(device: torch.device) -> int:
    """What is free on a CUDA device, and at most what is left of this process's share."""
    free_bytes, all_bytes = torch.cuda.mem_get_info(device)
    share_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * all_bytes)
    return min(free_bytes, share_bytes - torch.cuda.memory_allocated(device))


def _left(device: torch.device, num_bytes: int) -> str:
    share = torch.cuda.get_per_process_memory_fraction(device)
    of_share = "" if share == 1.0 else f", of which this worker may take {share:.0%},"
    return f"{torch.cuda.get_device_name(device)}{of_share} has {num_bytes / _GIB:.1f} GiB left"
