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
    return await wait_shielded(asyncio.wrap_future(calls.call(fn)))


async def wait_shielded(result: asyncio.Future[T]) -> T:
    """Like ``asyncio.shield``, without its complaint about an error that comes when the waiter has left."""
    result.add_done_callback(_retrieve)
    return await asyncio.shield(result)


def _retrieve(result: asyncio.Future[T]) -> None:
    if not result.cancelled():
        result.exception()
