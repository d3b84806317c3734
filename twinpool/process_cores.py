"""Which cores processes and threads may run on, as the operating system is told."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


def confine_process_tree(cores: Sequence[int]) -> None:
    """Move every thread of this process and of its descendants to ``cores`` (empty: leave it). What they start later inherits
    it."""
    if not cores:
        return
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(OSError):  # a process may end while it is looked at
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Run the calling thread on ``cores`` (empty: wherever it may run already), and where it ran before afterwards."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
