"""The way to the engine thread, when the waiter has left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from llm_engine.engine_calls import run_between_steps
from serving_core.errors import RefusalCode, Refused

T = TypeVar("T")


class HeldCalls:
    """An engine that answers when the test says so."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def call(self, fn: Callable[[], T]) -> Future[T]:
        return self.future


async def test_an_error_after_the_waiter_has_left_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    calls = HeldCalls()
    waiter = asyncio.create_task(run_between_steps(calls, lambda: None))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    calls.future.set_exception(Refused(RefusalCode.UNKNOWN_RESERVATION, "Nobody asks any more."))
    del calls, waiter
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert not caplog.records


async def test_an_error_reaches_who_waits() -> None:
    calls = HeldCalls()
    waiter = asyncio.create_task(run_between_steps(calls, lambda: None))
    await asyncio.sleep(0)
    calls.future.set_exception(Refused(RefusalCode.UNKNOWN_RESERVATION, "Nobody knows it."))
    with pytest.raises(Refused, match="Nobody knows it"):
        await waiter
