"""The memory of a server's own processes: its router and its workers."""

from __future__ import annotations

import psutil

from tests.e2e.server_process import ServerProcess

MAX_GROWTH_BYTES = 16 << 20
"""By how much a process may grow under a load that it has borne before."""


class ServerMemory:
    """Those processes that there are when it is made."""

    def __init__(self, server: ServerProcess) -> None:
        pids = {"router": server.process.pid} | {name: worker["pid"] for name, worker in server.workers().items()}
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}

    def resident_bytes(self) -> dict[str, int]:
        """By the worker's id, or ``router``."""
        return {name: process.memory_info().rss for name, process in self._processes.items()}


def in_mib(growth: dict[str, int]) -> dict[str, float]:
    """For a reader."""
    return {name: round(num_bytes / 2**20, 1) for name, num_bytes in growth.items()}
