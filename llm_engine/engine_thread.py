"""Settings of the engine thread that only that thread can make for itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from serving_core.errors import ConfigError


def configure_engine_thread(num_threads: int, cpu_cores: Sequence[int], niceness: int) -> None:
    """Bound the calling thread's kernels to ``num_threads`` threads, pin it to ``cpu_cores`` (empty: leave it free) and add
    ``niceness`` (0 to 19) to its priority.

    Must run on the engine thread before its first kernel: torch's setting binds only the thread that makes it, affinity and
    niceness are per thread on Linux, and the kernels' helper threads inherit both from it. Raises ConfigError for cores the
    process may not use.
    """
    torch.set_num_threads(num_threads)
    if cpu_cores and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, cpu_cores)
        except OSError as error:
            available = sorted(os.sched_getaffinity(0))
            raise ConfigError(f"the engine cannot be pinned to cores {list(cpu_cores)}; available are {available}.") from error
    if niceness:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
