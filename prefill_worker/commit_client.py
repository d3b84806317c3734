"""The prefill worker's way to Decode.Commit: one channel per decode worker, a deadline per call. gRPC's errors end here."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import grpc.aio

from serving_core.errors import WorkerLost
from serving_core.rpc import convert
from serving_core.rpc.channel import open_channel
from serving_core.rpc.v1 import decode_pb2, decode_pb2_grpc
from serving_core.transfer_ticket import HandoffCommit

_MAX_IDLE_CHANNELS = 32


class CommitClient:
    """Commits to any decode worker. Lives on one event loop; owns its channels. ``timeout_s`` bounds each call."""

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        assert timeout_s > 0
        self._timeout_s = timeout_s
        self._ways: OrderedDict[str, _Way] = OrderedDict()
        self._retired: list[_Way] = []
        self._is_closed = False

    def to(self, address: str) -> AddressedCommitter:
        """A ``Committer`` for the decode worker at HOST:PORT. Opens nothing yet."""
        return AddressedCommitter(self, address)

    async def commit(self, address: str, commit: HandoffCommit) -> None:
        """Raises ``Refused`` when the decode worker declined, ``WorkerLost`` when no answer came in time."""
        if self._is_closed:
            raise WorkerLost(f"The way to {address} is closed because this worker is stopping.")
        way = self._ways.get(address) or _Way(address=address, channel=open_channel(address))
        self._ways[address] = way
        self._ways.move_to_end(address)
        way.num_calls += 1
        try:
            request = decode_pb2.CommitRequest(commit=convert.commit_to_pb(commit))
            reply = await decode_pb2_grpc.DecodeStub(way.channel).Commit(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            # A new channel connects faster than gRPC's back-off lets an old one.
            self._retire(way)
            raise WorkerLost(f"The commit to {address} got no answer ({error.code().name}: {error.details()}).") from error
        finally:
            way.num_calls -= 1
            self._retire_oldest_idle()
            await self._close_unused()
        if reply.HasField("refusal"):
            raise convert.refusal_from_pb(reply.refusal)

    async def close(self) -> None:
        """Release every channel and take no more commits. Idempotent; meant for when no commit is under way any more."""
        self._is_closed = True
        for way in tuple(self._ways.values()):
            self._retire(way)
        await self._close_unused()

    def _retire(self, way: _Way) -> None:
        """Give the channel to no new call. Closing it would cancel the calls of other hand-offs, so they end first."""
        if self._ways.get(way.address) is way:
            del self._ways[way.address]
            self._retired.append(way)

    def _retire_oldest_idle(self) -> None:
        idle = [way for way in self._ways.values() if way.num_calls == 0]
        for way in idle[: max(0, len(idle) - _MAX_IDLE_CHANNELS)]:
            self._retire(way)

    async def _close_unused(self) -> None:
        unused = [way for way in self._retired if way.num_calls == 0]
        self._retired = [way for way in self._retired if way.num_calls > 0]
        for way in unused:
            await way.channel.close()


class AddressedCommitter:
    """The ``Committer`` of one hand-off."""

    def __init__(self, client: CommitClient, address: str) -> None:
        self._client = client
        self._address = address

    async def commit(self, commit: HandoffCommit) -> None:
        await self._client.commit(self._address, commit)


@dataclass(slots=True, kw_only=True, eq=False)
class _Way:
    address: str
    channel: grpc.aio.Channel
    num_calls: int = 0
