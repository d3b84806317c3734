"""The sender's end of a pair's gRPC call: messages out, messages in. gRPC's errors end here."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from kv_transfer.page_frame import MAX_FRAME_BYTES
from serving_core.errors import WorkerLost
from serving_core.rpc.channel import open_channel
from serving_core.rpc.cluster_token import OPEN, ClusterToken

SERVICE = "twinpool.kv.v1.PagePair"
METHOD = "Open"


class PairCall:
    """One call on a channel of its own to HOST:PORT. Connects with the first message."""

    def __init__(self, address: str, token: ClusterToken = OPEN) -> None:
        self._address = address
        self._channel = open_channel(address, max_message_bytes=MAX_FRAME_BYTES)
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = method(metadata=token.metadata)

    async def send(self, message: bytes) -> None:
        """Raises ``WorkerLost`` once the call is over; why, ``receive`` knows."""
        try:
            await self._call.write(message)
        except asyncio.CancelledError:
            # gRPC raises this for a cancelled call, too; only a cancelled task may end here.
            task = asyncio.current_task()
            if task is not None and task.cancelling() > 0:
                raise
            raise self._ended() from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise self._ended() from None

    async def receive(self) -> bytes:
        """The next message. Raises ``WorkerLost`` when there is none any more."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise WorkerLost(f"What listens at {self._address} takes no pages over torch.distributed.") from None
            raise WorkerLost(f"The pair with {self._address} broke ({error.code().name}: {error.details()}).") from None
        if not isinstance(message, bytes):  # gRPC's end mark is no bytes
            raise self._ended()
        return message

    async def close(self) -> None:
        """End the call, whatever is under way, and the channel. Idempotent, returns at once."""
        self._call.cancel()
        await self._channel.close()

    def _ended(self) -> WorkerLost:
        return WorkerLost(f"{self._address} ended the pair.")
