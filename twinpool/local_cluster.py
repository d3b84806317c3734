"""The Ray cluster on this machine that lives exactly as long as the server does. Knows nothing of workers.

Ray ties its processes to the thread that started them: when that thread ends, the kernel kills them. So one thread of our own
makes every blocking Ray call and lives until the cluster is down. It also keeps Ray from replacing our signal handlers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_OBJECT_STORE_BYTES = 75 << 20  # the smallest that Ray accepts; nothing of ours goes through it
_TEMP_DIR_PREFIX = "twinpool-"
_MAX_ROOT_LENGTH = 26
"""Ray puts Unix sockets far below its folder, and their paths must stay under 108 bytes."""


class LocalCluster:
    """Life: 1. construct; 2. ``start``; 3. ``call`` anything of Ray's; 4. ``stop``, which may come after any of these."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
        self._temp_dir: Path | None = None
        self._is_stopped = False

    async def start(self, *, num_workers: int) -> None:
        """Start Ray on loopback, with room for ``num_workers`` processes at once. Takes about three seconds."""
        await self.call(lambda: self._init(num_workers))

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function``, which may block on Ray, on the cluster's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def stop(self) -> None:
        """End every process of the cluster and delete its files. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        await self.call(self._shutdown)
        self._thread.shutdown()

    def _init(self, num_workers: int) -> None:
        # Ray reads these when it is imported, and its processes inherit them
        os.environ.update(
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # on Linux this is what binds every listener to 127.0.0.1
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=secrets.token_hex(32),
            RAY_USAGE_STATS_ENABLED="0",
            RAY_worker_niceness="0",
            RAY_DEDUP_LOGS="0",
        )
        import ray

        root = tempfile.gettempdir()
        self._temp_dir = Path(tempfile.mkdtemp(prefix=_TEMP_DIR_PREFIX, dir=root if len(root) <= _MAX_ROOT_LENGTH else "/tmp"))
        ray.init(
            address="local",
            num_cpus=num_workers,  # our actors ask for none; Ray starts this many processes ahead for them
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=True,  # how a worker's last words reach the terminal
            logging_level=40,
            _temp_dir=str(self._temp_dir),
        )

    def _shutdown(self) -> None:
        if self._temp_dir is None:
            return
        import ray

        ray.shutdown()
        shutil.rmtree(self._temp_dir, ignore_errors=True)
