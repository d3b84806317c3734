"""The one thread that makes every blocking call of Ray's.

Ray ties the processes it starts to the thread that started them: when that thread ends, the kernel kills them. So this one
lives until the cluster is left. It also keeps Ray's Python from replacing our signal handlers; what keeps
Ray's C++ from it is RAY_DISABLE_FAILURE_SIGNAL_HANDLER, set before Ray is imported.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

ABANDONED_EXIT_STATUS = 1


class RayThread:
    """Life: 1. construct; 2. ``call``; 3. ``end``, or ``abandon`` when a call may never return."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function``, which may block on Ray, on the thread; calls run one after another. A caller that is cancelled
        waits no longer; what has begun runs on."""
        result: Future[T] = Future()
        self._calls.put(lambda: _fulfil(result, function))
        return await asyncio.wrap_future(result)

    def end(self) -> None:
        """No call comes any more. Idempotent."""
        self._calls.put(None)

    def abandon(self) -> None:
        """Leave a call behind that blocks on Ray. The process's ordinary end would wait for Ray as well, so it ends without
        it, with status ``ABANDONED_EXIT_STATUS``. Idempotent."""
        atexit.register(os._exit, ABANDONED_EXIT_STATUS)  # before what Ray has registered

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _fulfil(result: Future[T], function: Callable[[], T]) -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
