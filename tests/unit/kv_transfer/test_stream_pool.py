"""Which stream serves which attempt, and when one ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kv_transfer.page_transport import Segment
from kv_transfer.stream_pool import Receiver, StreamPool
from serving_core.errors import WorkerLost
from serving_core.ids import Incarnation
from serving_core.transfer_ticket import TransferTicket
from tests.contract.page_path import make_ticket

FIRST, SECOND = make_ticket(address="127.0.0.1:1"), make_ticket(address="127.0.0.1:2")


class FakeStream:
    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.is_settled = True
        self.num_accepted = 0
        self.is_released = False

    async def write(self, segment: Segment) -> None:
        raise NotImplementedError

    async def flush(self) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        await asyncio.sleep(0)
        self.is_released = True


async def connect(ticket: TransferTicket) -> FakeStream:
    return FakeStream(Receiver.of(ticket))


@pytest.fixture
async def pool() -> AsyncIterator[StreamPool[FakeStream]]:
    pool = StreamPool(connect, max_idle=2)
    yield pool
    await pool.close()


async def test_attempts_follow_one_another_on_a_stream_and_have_one_each_at_a_time(pool: StreamPool[FakeStream]) -> None:
    async with pool.use(FIRST) as one, pool.use(FIRST) as other:
        assert one is not other
    async with pool.use(FIRST) as again:
        assert again in (one, other)
    async with pool.use(SECOND) as elsewhere:
        assert elsewhere not in (one, other)


async def test_another_life_of_a_receiver_has_a_stream_of_its_own(pool: StreamPool[FakeStream]) -> None:
    async with pool.use(FIRST) as one:
        pass
    async with pool.use(make_ticket(address="127.0.0.1:1", incarnation=Incarnation("next"))) as other:
        assert other is not one


@pytest.mark.parametrize("while_idle", [False, True])
async def test_a_stream_that_is_not_settled_is_released(pool: StreamPool[FakeStream], *, while_idle: bool) -> None:
    async with pool.use(FIRST) as one:
        one.is_settled = while_idle
    one.is_settled = False
    async with pool.use(FIRST) as other:
        assert other is not one
    await pool.close()
    assert one.is_released


async def test_the_longest_idle_goes_when_there_are_too_many(pool: StreamPool[FakeStream]) -> None:
    async with pool.use(FIRST) as one, pool.use(FIRST) as two, pool.use(SECOND) as three:
        pass  # given back in the order three, two, one
    async with pool.use(FIRST) as again, pool.use(FIRST) as also, pool.use(SECOND) as another:
        assert {again, also} == {one, two}
        assert another is not three


async def test_closing_releases_what_is_in_use_and_lends_nothing_more(pool: StreamPool[FakeStream]) -> None:
    async with pool.use(FIRST) as one:
        await pool.close()
        assert one.is_released
    with pytest.raises(WorkerLost, match="stopping"):
        async with pool.use(FIRST):
            pass


async def test_a_stream_ends_though_its_user_is_cancelled(pool: StreamPool[FakeStream]) -> None:
    streams: list[FakeStream] = []

    async def use() -> None:
        async with pool.use(FIRST) as stream:
            streams.append(stream)
            stream.is_settled = False
            await asyncio.Event().wait()

    user = asyncio.create_task(use())
    await asyncio.sleep(0)
    user.cancel()
    await asyncio.gather(user, return_exceptions=True)
    await pool.close()
    assert streams[0].is_released


async def test_closing_waits_no_longer_than_it_may() -> None:
    class StuckStream(FakeStream):
        async def release(self) -> None:
            await asyncio.Event().wait()

    async def connect_stuck(ticket: TransferTicket) -> StuckStream:
        return StuckStream(Receiver.of(ticket))

    pool = StreamPool(connect_stuck, max_idle=1)
    async with pool.use(FIRST):
        pass
    async with asyncio.timeout(5):
        await pool.close(0.01)
