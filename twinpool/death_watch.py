"""Ends processes when ours is killed and can no longer do it.

Ray's own processes end with the one that started them, except its agents, which first try for a minute to report to a cluster
that is gone. So a small process waits at the end of a pipe, which the kernel closes when we die, and kills what it was told to.
Run as a script it is that process, and needs nothing but the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class DeathWatch:
    """Over the processes ``pids``, from construction until ``end``."""

    def __init__(self, pids: Iterable[int]) -> None:
        watched = [f"{pid}:{started}" for pid in pids if (started := _start_time(pid)) is not None]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *watched],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us alone
        )

    def end(self) -> None:
        """Watch no longer; the processes live on. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _start_time(pid: int) -> str | None:
    """When the process began, in the kernel's ticks, which tells it from a later one with the same id; None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _kill_after_our_parent(watched: Iterable[str]) -> None:
    sys.stdin.read()
    for pid, _, started in (identity.partition(":") for identity in watched):
        if _start_time(int(pid)) == started:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    _kill_after_our_parent(sys.argv[1:])
