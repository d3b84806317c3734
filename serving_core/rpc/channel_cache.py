"""The channels of a worker to other workers: opened when first used, shared, and closed when they are of no more use.

Knows no service. Failures of calls are its users', who say so with ``retire``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serving_core.errors import WorkerLost
from serving_core.ids import Incarnation
from serving_core.rpc.channel import open_channel


class SharedChannel:
    """One channel to one incarnation of a worker at HOST:PORT, for use inside ``ChannelCache.use``."""

    def __init__(self, address: str, incarnation: Incarnation, max_message_bytes: int) -> None:
        self.address = address
        self.incarnation = incarnation
        self.channel = open_channel(address, max_message_bytes=max_message_bytes)
        self.num_users = 0
        self.is_retired = False

    def retire(self) -> None:
        """Give the channel to no new user; it closes after its last. Idempotent. For one on which a call was lost: a new one
        connects faster than gRPC's back-off lets the old one."""
        self.is_retired = True


class ChannelCache:
    """Owns its channels, at most one that is given out per address. Lives on one event loop.

    A worker that comes back has a new incarnation, and mostly a new address, so nobody might ever use the channel to its old
    self again: at most ``max_idle`` channels stay open without a user, those used last.
    """

    def __init__(self, *, max_idle: int = 32, max_message_bytes: int = 64 << 20) -> None:
        assert max_idle >= 0
        self._max_idle = max_idle
        self._max_message_bytes = max_message_bytes
        self._open: list[SharedChannel] = []  # in order of last use
        self._is_closed = False

    def __len__(self) -> int:
        """Channels that are open."""
        return len(self._open)

    @asynccontextmanager
    async def use(self, address: str, incarnation: Incarnation) -> AsyncIterator[SharedChannel]:
        """The channel to that incarnation, which stays open until the context is left. It connects with the first call. Raises
        ``WorkerLost`` after ``close``."""
        if self._is_closed:
            raise WorkerLost(f"The way to {address} is closed because this worker is stopping.")
        shared = self._find(address, incarnation)
        shared.num_users += 1
        try:
            yield shared
        finally:
            shared.num_users -= 1
            await self._close_unneeded()

    async def close(self) -> None:
        """Close every channel, which cancels the calls on them, and give out no more. Idempotent."""
        self._is_closed = True
        while self._open:
            await self._open.pop().channel.close()

    def _find(self, address: str, incarnation: Incarnation) -> SharedChannel:
        found = next((shared for shared in self._open if shared.address == address and not shared.is_retired), None)
        if found is not None and found.incarnation == incarnation:
            self._open.remove(found)
        else:
            if found is not None:
                found.retire()
            found = SharedChannel(address, incarnation, self._max_message_bytes)
        self._open.append(found)
        return found

    async def _close_unneeded(self) -> None:
        while (unneeded := self._next_unneeded()) is not None:
            self._open.remove(unneeded)
            await unneeded.channel.close()

    def _next_unneeded(self) -> SharedChannel | None:
        idle = [shared for shared in self._open if shared.num_users == 0]
        retired = next((shared for shared in idle if shared.is_retired), None)
        return retired or (idle[0] if len(idle) > self._max_idle else None)
