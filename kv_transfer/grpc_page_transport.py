"""The sending end of the page path over gRPC: one stream per attempt, bounded by credits, over channels that they share.

It owns channels and streams, never pages: a segment is copied into its frame before ``write`` returns. It waits for no answer
longer than the stall time-out. gRPC's errors end here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import grpc
import grpc.aio

from kv_transfer.grpc_page_service import METHOD, SERVICE
from kv_transfer.page_answer import decode_answer
from kv_transfer.page_frame import MAX_FRAME_BYTES, encode_frame
from kv_transfer.page_transport import PageStream, Segment
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.rpc.channel_cache import ChannelCache, SharedChannel
from serving_core.transfer_ticket import TransferTicket


class GrpcPageTransport:
    """``PageTransport`` over gRPC. Lives on one event loop.

    ``max_unanswered_segments`` are the credits of a stream: more are never under way. ``stall_timeout_s`` bounds every wait
    for the receiver: a stream that makes no progress for so long raises ``WorkerLost``.
    """

    name = "grpc"

    def __init__(self, *, max_unanswered_segments: int = 8, stall_timeout_s: float = 5.0) -> None:
        assert max_unanswered_segments >= 1
        assert stall_timeout_s > 0
        self._max_unanswered_segments = max_unanswered_segments
        self._stall_timeout_s = stall_timeout_s
        self._channels = ChannelCache(max_message_bytes=MAX_FRAME_BYTES)

    @asynccontextmanager
    async def open(self, ticket: TransferTicket) -> AsyncIterator[PageStream]:
        """A stream to the ticket's decode worker. Connects with the first write."""
        async with self._channels.use(ticket.decode_address, ticket.decode_incarnation) as shared:
            stream = _GrpcPageStream(shared, self._max_unanswered_segments, self._stall_timeout_s)
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

    def __init__(self, shared: SharedChannel, max_unanswered_segments: int, stall_timeout_s: float) -> None:
        self._address = shared.address
        self._max_unanswered_segments = max_unanswered_segments
        self._stall_timeout_s = stall_timeout_s
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = shared.channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        self._num_written = 0
        self._num_accepted = 0
        self._end: Refused | WorkerLost | None = None
        self._has_news = asyncio.Event()
        self._reader = asyncio.create_task(self._read_answers())

    @property
    def is_broken(self) -> bool:
        """The way failed, as opposed to the receiver's refusing."""
        return isinstance(self._end, WorkerLost)

    async def write(self, segment: Segment) -> None:
        while self._num_written - self._num_accepted >= self._max_unanswered_segments:
            await self._wait_for_answer()
        if self._end is not None:
            raise self._end
        frame = encode_frame(segment)
        self._num_written += 1
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send(frame)
        except TimeoutError:
            self._fail_stalled()

    async def flush(self) -> None:
        while self._num_accepted < self._num_written:
            await self._wait_for_answer()

    async def release(self) -> None:
        """Cancel what is under way. Idempotent, returns at once."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.wait((self._reader,))
        if not self._reader.cancelled():  # it is when it never came to run
            self._reader.result()

    async def _wait_for_answer(self) -> None:
        if self._end is not None:
            raise self._end
        self._has_news.clear()
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._has_news.wait()
        except TimeoutError:
            self._fail_stalled()
        if self._end is not None:
            raise self._end

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

    async def _raise_end(self) -> NoReturn:
        # The call is over, so the reader is about to know why; it may be a refusal, which outranks the broken write.
        await asyncio.wait((self._reader,))
        assert self._end is not None
        raise self._end

    def _fail_stalled(self) -> NoReturn:
        self._end = self._end or WorkerLost(f"{self._address} accepted no page bytes for {self._stall_timeout_s} s.")
        raise self._end

    async def _read_answers(self) -> None:
        try:
            while isinstance(answer := await self._call.read(), bytes):
                num_accepted = decode_answer(answer)
                if not self._num_accepted < num_accepted <= self._num_written:
                    raise Refused(
                        RefusalCode.MALFORMED,
                        f"{self._address} claims {num_accepted} accepted segments after {self._num_accepted} of "
                        f"{self._num_written}.",
                    )
                self._num_accepted = num_accepted
                self._has_news.set()
            self._end = WorkerLost(f"{self._address} ended the page stream.")
        except Refused as refusal:
            self._end = refusal
            self._call.cancel()  # wakes a write that flow control holds
        except grpc.aio.AioRpcError as error:
            self._end = _map_error(self._address, error)
        except asyncio.CancelledError:
            self._end = self._end or WorkerLost(f"The page stream to {self._address} was cancelled.")
        finally:
            self._has_news.set()


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
