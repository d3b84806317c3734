"""The one thread on which everything of a pair blocks: its ordered queue. It knows nothing of what it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

NAME = "twinpool-pair"


class PairThread:
    """Starts with the first call and ends with ``end``. Used from one event loop.

    A call that runs cannot be cut short, only no longer waited for; so each must be bounded in time, and whatever it works on
    stays alive until then.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=NAME)
        self._is_ended = False

    @property
    def is_ended(self) -> bool:
        """Whether the last call was given; it may still run."""
        return self._is_ended

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``function`` after those that came before it."""
        return asyncio.wrap_future(self._executor.submit(function))

    def end(self, function: Callable[[], None]) -> asyncio.Future[None]:
        """Run ``function`` as the last; nothing may be called any more."""
        assert not self._is_ended
        self._is_ended = True
        ending = self.call(function)
        self._executor.shutdown(wait=False)
        return ending
