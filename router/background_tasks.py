"""Owns short asyncio tasks that outlive the call which began them: releases, request lives, closing channels."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class BackgroundTasks:
    """Holds each task until it is done. Every coroutine given to it bounds its own time; ``join`` then ends too."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work`` on the running loop. It must map its own errors: one that escapes goes to the loop's handler."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def join(self) -> None:
        """Wait until no task is left, those spawned meanwhile included. Never cancels and never raises for a task."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a background task of the router failed", "exception": error, "task": task}
            )
