"""The sending end of the page path over gRPC: one stream per attempt, bounded by credits, over channels that they share.

It owns channels and streams, never pages: a segment is copied into its frame before ``write`` returns. It waits for no answer
longer than the stall time-out. gRPC's errors end here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from kv_transfer.grpc_page_service import METHOD, SERVICE
from kv_transfer.page_frame import MAX_FRAME_BYTES, encode_frame
from kv_transfer.page_transport import PageStream, Segment
from kv_transfer.stream_credits import StreamCredits
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.rpc.channel_cache import ChannelCache, SharedChannel
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.transfer_ticket import TransferTicket


class GrpcPageTransport:
    """``PageTransport`` over gRPC. Lives on one event loop.

    ``max_unanswered_segments`` are the credits of a stream: more are never under way. ``stall_timeout_s`` bounds every wait
    for the receiver: a stream that makes no progress for so long raises ``WorkerLost``.
    """

    name = "grpc"

    def __init__(self, *, token: ClusterToken = OPEN, max_unanswered_segments: int = 8, stall_timeout_s: float = 5.0) -> None:
        assert max_unanswered_segments >= 1
        assert stall_timeout_s > 0
        self._token = token
        self._max_unanswered_segments = max_unanswered_segments
        self._stall_timeout_s = stall_timeout_s
        self._channels = ChannelCache(max_message_bytes=MAX_FRAME_BYTES)

    @asynccontextmanager
    async def open(self, ticket: TransferTicket) -> AsyncIterator[PageStream]:
        """A stream to the ticket's decode worker. Connects with the first write."""
        async with self._channels.use(ticket.decode_address, ticket.decode_incarnation) as shared:
            stream = _GrpcPageStream(shared, self._token, self._max_unanswered_segments, self._stall_timeout_s)
            try:
                yield stream
            finally:
                if stream.is_broken:
                    shared.retire()
                await stream.release()

    async def close(self) -> None:
        """Release every channel; streams still open raise ``WorkerLost``. Idempotent."""
        await self._channels.close()


class _GrpcPageStream:
    """One call. A task of its own reads answers, so that a refusal is known however many writes are under way."""

    def __init__(
        self, shared: SharedChannel, token: ClusterToken, max_unanswered_segments: int, stall_timeout_s: float
    ) -> None:
        self._address = shared.address
        self._stall_timeout_s = stall_timeout_s
        self._credits = StreamCredits(
            shared.address, max_unanswered_segments=max_unanswered_segments, stall_timeout_s=stall_timeout_s
        )
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = shared.channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = method(metadata=token.metadata)
        self._reader = asyncio.create_task(self._read_answers())

    @property
    def num_accepted(self) -> int:
        return self._credits.num_accepted

    @property
    def is_broken(self) -> bool:
        """See ``StreamCredits``."""
        return self._credits.is_broken

    async def write(self, segment: Segment) -> None:
        await self._credits.wait_for_credit()
        frame = encode_frame(segment)
        self._credits.use()
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send(frame)
        except TimeoutError:
            self._credits.end_stalled()

    async def flush(self) -> None:
        await self._credits.wait_until_accepted()

    async def release(self) -> None:
        """Cancel what is under way. Idempotent, returns at once."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.wait((self._reader,))
        if not self._reader.cancelled():  # it is when it never came to run
            self._reader.result()

    async def _send(self, frame: bytes) -> None:
        try:
            await self._call.write(frame)
        except asyncio.CancelledError:
            # gRPC raises this for a cancelled call, too; only a cancelled task may end here.
            if _is_cancelling():
                raise
            await self._raise_end()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._raise_end()

    async def _raise_end(self) -> None:
        # The call is over, so the reader is about to know why; it may be a refusal, which outranks the broken write.
        await asyncio.wait((self._reader,))
        self._credits.raise_error()

    async def _read_answers(self) -> None:
        try:
            while isinstance(answer := await self._call.read(), bytes):
                self._credits.take_answer(answer)
            self._credits.end(WorkerLost(f"{self._address} ended the page stream."))
        except Refused as refusal:
            self._credits.end(refusal)
            self._call.cancel()  # wakes a write that flow control holds
        except grpc.aio.AioRpcError as error:
            self._credits.end(_map_error(self._address, error))
        except asyncio.CancelledError:
            self._credits.end(WorkerLost(f"The page stream to {self._address} was cancelled."))


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _map_error(address: str, error: grpc.aio.AioRpcError) -> Refused | WorkerLost:
    # A write that fails before the call's status is here makes gRPC report INTERNAL instead: lost now, refused at the next try.
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Refused(RefusalCode.MALFORMED, f"{address} declined a page frame: {error.details()}.")
        case grpc.StatusCode.UNIMPLEMENTED:
            return Refused(RefusalCode.UNKNOWN_RESERVATION, f"What listens at {address} takes no pages.")
        case code:
            return WorkerLost(f"The page stream to {address} broke ({code.name}: {error.details()}).")
