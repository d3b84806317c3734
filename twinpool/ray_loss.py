"""Notices that a part of Ray is gone without which no worker can be started any more. Ray itself says nothing when that is its
raylet, and ends this process a minute after its control store (GCS)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Collection
from contextlib import suppress

import grpc
import psutil

GONE_AFTER_S = 20.0
"""Ray gives a control store a minute to come back. What is under way needs time to end before that."""
_CHANNEL_OPTIONS = (
    ("grpc.client_idle_timeout_ms", 2**31 - 1),  # an idle channel would notice nothing
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
)

_log = logging.getLogger(__name__)


class RayLoss:
    """Life: 1. construct; 2. ``watch_children``, ``watch_process``, ``watch_server``; 3. ``wait``, at any time; 4. ``end``."""

    def __init__(self) -> None:
        self._lost = asyncio.Event()
        self._what = ""
        self._processes: set[int] = set()
        """Descriptors, readable once their process has ended."""
        self._watching: list[asyncio.Task[None]] = []
        self._child_names: Collection[str] = ()

    def watch_children(self, names: Collection[str]) -> None:
        """Those of this process that are called so, also when they start later. Only on the main thread's loop."""
        self._child_names = names
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._check_children)

    def watch_process(self, name: str, pid: int) -> None:
        """``pid`` is a process of this machine. Where the kernel lets none be watched, as some containers have it, its end goes
        unnoticed."""
        what = _describe_end(name, pid)
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            self._note(what)
            return
        except OSError as error:
            _log.warning("Ray's %s (process %d) cannot be watched, and its end will not be noticed: %s", name, pid, error)
            return
        self._processes.add(process)
        asyncio.get_running_loop().add_reader(process, self._note_end, process, what)

    def watch_server(self, name: str, address: str) -> None:
        """``address`` is HOST:PORT of a gRPC server, which may be away for ``GONE_AFTER_S``."""
        self._watching.append(asyncio.create_task(self._watch_server(name, address)))

    async def wait(self) -> str:
        """Until something is gone. Returns what, as the beginning of a sentence."""
        await self._lost.wait()
        return self._what

    def end(self) -> None:
        """Watch no longer. Idempotent."""
        for task in self._watching:
            task.cancel()
        for process in list(self._processes):
            self._release(process)
        if self._child_names:
            self._child_names = ()
            asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    async def _watch_server(self, name: str, address: str) -> None:
        async with grpc.aio.insecure_channel(f"dns:///{address}", options=_CHANNEL_OPTIONS) as channel:
            while True:
                try:
                    async with asyncio.timeout(GONE_AFTER_S):
                        await channel.channel_ready()
                except TimeoutError:
                    self._note(f"Ray's {name} at {address} has been away for {GONE_AFTER_S:g} s")
                    return
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

    def _check_children(self) -> None:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if (name := child.name()) in self._child_names and child.status() == psutil.STATUS_ZOMBIE:
                    self._note(_describe_end(name, child.pid))

    def _note_end(self, process: int, what: str) -> None:
        self._release(process)
        self._note(what)

    def _release(self, process: int) -> None:
        self._processes.remove(process)
        asyncio.get_running_loop().remove_reader(process)
        os.close(process)

    def _note(self, what: str) -> None:
        self._what = self._what or what
        self._lost.set()


def _describe_end(name: str, pid: int) -> str:
    return f"Ray's {name} (process {pid}) has ended"
