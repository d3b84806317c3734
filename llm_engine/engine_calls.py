"""The way from an event loop to the engine thread and back. Knows neither what is called nor the loop behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")


class EngineCalls(Protocol):
    """The step loop as services see it."""

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Run ``fn`` on the engine thread between two steps, in order of calls. Never blocks; any thread."""


async def run_between_steps(calls: EngineCalls, fn: Callable[[], T]) -> T:
    """The result of ``fn``, run on the engine thread. It is run even if the waiter is cancelled meanwhile."""
    return await asyncio.shield(asyncio.wrap_future(calls.call(fn)))
