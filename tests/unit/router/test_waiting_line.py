"""The line: order, length, waiting times, and leaving it."""

from __future__ import annotations

import asyncio

import pytest

from router.waiting_line import WaitingLine
from serving_core.clock import Clock, ManualClock, MonotonicClock
from serving_core.errors import NoCapacity


class Counter:
    """A resource with some free places, taken one at a time."""

    def __init__(self, num_free: int = 0) -> None:
        self.num_free = num_free
        self.takers: list[str] = []

    def taker(self, name: str) -> bool:
        if self.num_free == 0:
            return False
        self.num_free -= 1
        self.takers.append(name)
        return True


class Line:
    """A line in front of a counter, with named waiters."""

    def __init__(
        self,
        *,
        max_waiting: int = 10,
        worker_wait_s: float = 5.0,
        max_wait_s: float = 5.0,
        missing: list[str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.counter = Counter()
        self.missing = missing or []
        self.waiting = WaitingLine(
            clock=clock or MonotonicClock(),
            missing_phases=lambda: self.missing,
            worker_wait_s=worker_wait_s,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
        )

    async def join(self, name: str) -> asyncio.Task[None]:
        place = self.waiting.draw_place()
        task = asyncio.create_task(self.waiting.wait_turn(place, lambda: self.counter.taker(name)))
        await asyncio.sleep(0)
        return task

    def free(self, num_free: int = 1) -> None:
        self.counter.num_free += num_free
        self.waiting.poke()


async def test_served_at_once_when_there_is_room() -> None:
    line = Line()
    line.counter.num_free = 1
    await line.waiting.wait_turn(line.waiting.draw_place(), lambda: line.counter.taker("a"))
    assert line.counter.takers == ["a"]
    assert len(line.waiting) == 0


async def test_first_come_first_served() -> None:
    line = Line()
    tasks = [await line.join(name) for name in "abc"]
    line.free()
    await tasks[0]
    assert line.counter.takers == ["a"]
    line.free(2)
    await asyncio.gather(*tasks)
    assert line.counter.takers == ["a", "b", "c"]


async def test_nobody_passes_a_head_that_cannot_be_served() -> None:
    line = Line()
    large = asyncio.create_task(line.waiting.wait_turn(line.waiting.draw_place(), lambda: False))
    await asyncio.sleep(0)
    small = await line.join("small")
    line.free(5)
    await asyncio.sleep(0)
    assert line.counter.takers == []
    # a head that leaves lets the next one through
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    await small
    assert line.counter.takers == ["small"]


async def test_who_comes_back_gets_the_old_place() -> None:
    line = Line(max_waiting=1)
    place = line.waiting.draw_place()
    second = await line.join("second")
    back = asyncio.create_task(line.waiting.wait_turn(place, lambda: line.counter.taker("first"), is_returning=True))
    await asyncio.sleep(0)
    assert len(line.waiting) == 2
    line.free(2)
    await asyncio.gather(second, back)
    assert line.counter.takers == ["first", "second"]


async def test_full_line() -> None:
    line = Line(max_waiting=1)
    first = await line.join("first")
    with pytest.raises(NoCapacity, match="1 requests are waiting, which is the limit") as caught:
        await (await line.join("second"))
    assert caught.value.retry_after_s > 0
    assert caught.value.is_queue_full
    line.free()
    await first


async def test_cancelled_waiters_leave_cleanly() -> None:
    line = Line()
    tasks = [await line.join(name) for name in "abc"]
    tasks[0].cancel()
    tasks[1].cancel()
    await asyncio.gather(*tasks[:2], return_exceptions=True)
    assert len(line.waiting) == 1
    line.free()
    await tasks[2]
    assert line.counter.takers == ["c"]


async def test_no_worker_in_time_names_the_phase() -> None:
    line = Line(worker_wait_s=0.08, missing=["decode"])
    with pytest.raises(NoCapacity, match=r"no ready decode worker came within 0\.1 s") as caught:
        await (await line.join("a"))
    assert not caught.value.is_queue_full
    assert len(line.waiting) == 0


async def test_waiting_for_room_is_not_waiting_for_a_worker() -> None:
    line = Line(worker_wait_s=0.02, max_wait_s=0.1)
    with pytest.raises(NoCapacity, match=r"no worker had room within 0\.1 s"):
        await (await line.join("a"))


async def test_the_wait_for_a_worker_begins_when_it_is_lost() -> None:
    clock = ManualClock()
    line = Line(worker_wait_s=5.0, max_wait_s=100.0, clock=clock)
    task = await line.join("a")
    # 1. busy for long, then the worker goes
    clock.advance(50)
    line.missing.append("prefill")
    line.waiting.poke()
    # 2. it comes back in time: the time counts anew when it goes again
    clock.advance(4)
    line.missing.clear()
    line.waiting.poke()
    clock.advance(4)
    line.missing.append("prefill")
    line.waiting.poke()
    clock.advance(4)
    line.waiting.poke()
    await asyncio.sleep(0)
    assert not task.done()
    # 3. gone for too long
    clock.advance(2)
    line.waiting.poke()
    with pytest.raises(NoCapacity, match="no ready prefill worker"):
        await task


async def test_who_waits_anew_keeps_the_place_but_not_the_time() -> None:
    clock = ManualClock()
    line = Line(worker_wait_s=5.0, max_wait_s=20.0, clock=clock, missing=["decode"])
    place = line.waiting.draw_place()
    clock.advance(100)
    younger = await line.join("younger")
    place = line.waiting.renew_place(place)
    back = asyncio.create_task(line.waiting.wait_turn(place, lambda: line.counter.taker("back"), is_returning=True))
    await asyncio.sleep(0)
    clock.advance(4)
    line.free(2)
    await asyncio.gather(younger, back)
    assert line.counter.takers == ["back", "younger"]


async def test_what_is_let_go_does_not_pass_to_those_behind() -> None:
    line = Line()
    line.counter.num_free = 1
    place = line.waiting.draw_place()
    await line.waiting.wait_turn(place, lambda: line.counter.taker("first"))
    behind = await line.join("behind")
    is_holding = True

    def let_go() -> None:
        nonlocal is_holding
        line.free()
        is_holding = False

    def take_once_free() -> bool:
        return not is_holding and line.counter.taker("first")

    await line.waiting.wait_turn(place, take_once_free, is_returning=True, let_go=let_go)
    assert line.counter.takers == ["first", "first"]
    line.free()
    await behind
