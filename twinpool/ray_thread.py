"""The one thread that makes every blocking call of Ray's.

Ray ties the processes it starts to the thread that started them: when that thread ends, the kernel kills them. So this one
lives until the cluster is left. It also keeps Ray from replacing our signal handlers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class RayThread:
    """Life: 1. construct; 2. ``call``; 3. ``end``."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function``, which may block on Ray, on the thread; calls run one after another."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def end(self) -> None:
        """Waits for calls that still run. Idempotent."""
        self._executor.shutdown()
