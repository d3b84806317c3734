"""The Ray cluster on this machine that lives exactly as long as the server does. Knows nothing of workers."""

from __future__ import annotations

import ctypes
import os
import secrets
import tempfile
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from serving_core.errors import TwinpoolError
from twinpool.cluster import WorkerPlaces
from twinpool.death_watch import DeathWatch
from twinpool.node_address import node_address
from twinpool.ray_loss import RayLoss
from twinpool.ray_thread import RayThread
from twinpool.temp_folder import TempFolder, remove_abandoned_folders
from twinpool.worker_places import gpus_per_worker

T = TypeVar("T")

_OBJECT_STORE_BYTES = 75 << 20  # the smallest that Ray accepts; nothing of ours goes through it
_MAX_ROOT_LENGTH = 26
"""Ray puts Unix sockets far below its folder, and their paths must stay under 108 bytes."""
_VITAL_PROCESSES = ("gcs_server", "raylet")
_KILL_TIMEOUT_S = 5.0
_MAX_CAUSE_LENGTH = 300
_PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


class LocalCluster:
    """See ``Cluster``. ``num_gpus`` of this machine are divided among the workers."""

    def __init__(self, *, num_gpus: int) -> None:
        self._num_gpus = num_gpus
        self._thread = RayThread()
        self._loss = RayLoss()
        self._folder: TempFolder | None = None
        self._death_watch: DeathWatch | None = None
        self._is_stopped = False

    async def start(self, *, num_workers: int) -> WorkerPlaces:
        """Start Ray on loopback, with room for ``num_workers`` processes at once. Takes about three seconds. Raises
        ``TwinpoolError`` when Ray cannot start."""
        self._loss.watch_children(_VITAL_PROCESSES)  # Ray may wait a minute for one that dies while it starts
        await self.call(lambda: self._init(num_workers))
        return WorkerPlaces(host=node_address(), num_gpus=gpus_per_worker(self._num_gpus, num_workers))

    async def call(self, function: Callable[[], T]) -> T:
        """See ``Cluster``."""
        return await self._thread.call(function)

    async def wait_lost(self) -> str:
        """See ``Cluster``."""
        return await self._loss.wait()

    async def stop(self) -> None:
        """End every process of the cluster and delete its files. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._loss.end()
        await self.call(self._shutdown)
        self._thread.end()

    def abandon(self) -> None:
        """See ``Cluster``. Workers whose raylet is gone already end with this process."""
        self._is_stopped = True
        self._loss.end()
        self._thread.abandon()
        _kill_family()
        if self._folder is not None:
            self._folder.remove()

    def _init(self, num_workers: int) -> None:
        # Ray reads these when it is imported, and its processes inherit them
        os.environ.update(
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # on Linux this is what binds every listener to 127.0.0.1
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=secrets.token_hex(32),
            RAY_USAGE_STATS_ENABLED="0",
            RAY_worker_niceness="0",
            RAY_DEDUP_LOGS="0",
            RAY_DISABLE_FAILURE_SIGNAL_HANDLER="1",  # its handler of SIGTERM would replace ours
        )
        import ray

        root = Path(tempfile.gettempdir())
        if len(str(root)) > _MAX_ROOT_LENGTH:
            root = Path("/tmp")
        remove_abandoned_folders(root)
        self._folder = TempFolder(root)
        _adopt_orphans()
        try:
            ray.init(
                address="local",
                num_cpus=num_workers,  # our actors ask for none; Ray starts this many processes ahead for them
                num_gpus=self._num_gpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=True,  # how a worker's last words reach the terminal
                logging_level=40,
                _temp_dir=str(self._folder.path),
            )
        except Exception as error:  # Ray has no class for what can go wrong here
            cause = textwrap.shorten(str(error), _MAX_CAUSE_LENGTH)
            raise TwinpoolError(f"Ray cannot start on this machine; it says: {cause}") from error
        self._death_watch = DeathWatch(child.pid for child in psutil.Process().children(recursive=True))

    def _shutdown(self) -> None:
        if self._folder is None:
            return
        import ray

        ray.shutdown()
        if self._death_watch is not None:
            self._death_watch.end()
        _kill_family()
        self._folder.remove()


def _adopt_orphans() -> None:
    """Make whatever the raylet leaves behind when it dies, such as its agents, children of ours, so that we find them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not let this process adopt orphans")


def _kill_family() -> None:
    """End whatever this process has started and adopted."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=_KILL_TIMEOUT_S)
