"""Which channels are shared, kept and closed. None of them ever connects."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc
import pytest

from serving_core.errors import WorkerLost
from serving_core.ids import Incarnation
from serving_core.rpc.channel_cache import ChannelCache, SharedChannel

FIRST, SECOND = Incarnation("first"), Incarnation("second")


def address_of(number: int) -> str:
    return f"127.0.0.1:{number + 1}"


async def touch(channels: ChannelCache, number: int, incarnation: Incarnation = FIRST) -> SharedChannel:
    async with channels.use(address_of(number), incarnation) as shared:
        return shared


def is_closed(shared: SharedChannel) -> bool:
    return shared.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_one_channel_for_all_users_of_an_incarnation() -> None:
    channels = ChannelCache()
    async with channels.use(address_of(0), FIRST) as one, channels.use(address_of(0), FIRST) as other:
        assert one is other
    assert await touch(channels, 0) is one
    assert len(channels) == 1
    await channels.close()


async def test_a_new_incarnation_gets_a_channel_of_its_own_and_the_old_one_ends_with_its_last_user() -> None:
    channels = ChannelCache()
    async with channels.use(address_of(0), FIRST) as old:
        new = await touch(channels, 0, SECOND)
        assert new is not old
        assert not is_closed(old)
    assert is_closed(old)
    assert not is_closed(new)
    assert await touch(channels, 0, SECOND) is new
    await channels.close()


async def test_a_retired_channel_gets_no_new_user_and_ends_with_its_last() -> None:
    channels = ChannelCache()
    async with channels.use(address_of(0), FIRST) as shared:
        async with channels.use(address_of(0), FIRST) as same:
            same.retire()
            same.retire()
        assert await touch(channels, 0) is not shared
        assert not is_closed(shared)
    assert is_closed(shared)
    await channels.close()


async def test_workers_that_nobody_comes_back_to_leave_no_channel_behind() -> None:
    """A worker that restarts comes up at a new port: nothing ever says that the old one is of no more use."""
    channels = ChannelCache(max_idle=3)
    opened = [await touch(channels, number) for number in range(10)]
    assert [is_closed(shared) for shared in opened] == [True] * 7 + [False] * 3
    # Use counts, not age.
    assert await touch(channels, 7) is opened[7]
    await touch(channels, 10)
    assert [is_closed(shared) for shared in opened[7:]] == [False, True, False]
    await channels.close()


async def test_channels_in_use_are_not_bounded() -> None:
    channels = ChannelCache(max_idle=1)
    async with AsyncExitStack() as stack:
        used = [await stack.enter_async_context(channels.use(address_of(number), FIRST)) for number in range(4)]
        assert not any(map(is_closed, used))
    assert len(channels) == 1
    await channels.close()


async def test_close_closes_all_and_gives_out_no_more() -> None:
    channels = ChannelCache()
    idle = await touch(channels, 0)
    async with channels.use(address_of(1), FIRST) as used:
        await channels.close()
        assert is_closed(idle)
        assert is_closed(used)
    await channels.close()
    with pytest.raises(WorkerLost, match="is stopping"):
        await touch(channels, 0)
    assert len(channels) == 0
