"""Calls run one after another, and one that never returns holds nothing up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from twinpool.ray_thread import ABANDONED_EXIT_STATUS, RayThread


async def test_calls_run_in_order_on_one_thread() -> None:
    thread = RayThread()
    names = await asyncio.gather(*(thread.call(lambda: threading.current_thread().name) for _ in range(3)))
    assert names == ["ray"] * 3
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    assert await thread.call(lambda: 1) == 1
    thread.end()
    thread.end()


async def test_a_caller_that_is_cancelled_waits_no_longer() -> None:
    thread, may_end = RayThread(), threading.Event()
    # 1. the first call blocks, the second waits for it; both callers leave
    calls = [asyncio.create_task(thread.call(function)) for function in (may_end.wait, lambda: pytest.fail("was left"))]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls, timeout=5)
    assert all(call.cancelled() for call in calls)
    # 2. what had begun runs on, what had not is skipped
    may_end.set()
    assert await thread.call(lambda: 3) == 3
    thread.end()


_BLOCKED = """
import asyncio, atexit, threading
from twinpool.ray_thread import RayThread

async def main():
    thread = RayThread()
    atexit.register(threading.Event().wait)  # as Ray's own end, which waits too
    call = asyncio.create_task(thread.call(threading.Event().wait))
    await asyncio.sleep(0)
    thread.abandon()
    print("left", flush=True)

asyncio.run(main())
"""


def test_a_process_ends_while_a_call_blocks() -> None:
    ended = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (ABANDONED_EXIT_STATUS, "left\n", "")
