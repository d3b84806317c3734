"""The receiving end of the page path over gRPC: checks frames, hands segments to the sink, answers. It owns no page and keeps
no state between two streams.

One stream carries one attempt: 1. a frame arrives and is checked; 2. the sink takes all that are there, up to a bound, while
the next ones are read; 3. the answer says how many were accepted, in order; 4. the first refusal is answered and ends the
stream, after everything before it was accepted. The sender, told so, leaves; the receiver waits a moment for that, because
gRPC on the sender's side drops answers not yet read once a write meets an ended call.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

import grpc
import grpc.aio

from kv_transfer.page_answer import encode_accepted, encode_refused
from kv_transfer.page_frame import decode_frame
from kv_transfer.page_transport import PageSink
from kv_transfer.segment_inbox import SegmentInbox
from serving_core.errors import RefusalCode, Refused
from serving_core.rpc.bounded_call import bounded_call

SERVICE = "twinpool.kv.v1.PagePath"
METHOD = "Write"

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class GrpcPageService:
    """Serves ``/twinpool.kv.v1.PagePath/Write`` in front of ``sink``. Messages are raw bytes: no protobuf, no pickle.

    The server it is added to should refuse messages above ``page_frame.MAX_FRAME_BYTES``; larger frames that get through are
    refused here. ``max_batch_segments`` bounds one call of the sink, and what a stream holds in memory to twice that many
    frames; ``max_idle_s`` ends a stream on which nothing came for that long, ``max_wait_s`` one whose frames the sink did not
    take in that time, ``linger_s`` one that was refused.
    """

    def __init__(
        self,
        sink: PageSink,
        *,
        max_batch_segments: int = 8,
        max_idle_s: float = 60.0,
        max_wait_s: float = 30.0,
        linger_s: float = 1.0,
    ) -> None:
        assert max_batch_segments >= 1
        assert max_idle_s > 0
        assert max_wait_s > 0
        assert linger_s > 0
        self._sink = sink
        self._max_batch_segments = max_batch_segments
        self._max_idle_s = max_idle_s
        self._max_wait_s = max_wait_s
        self._linger_s = linger_s
        self._num_refused_writes: Counter[RefusalCode] = Counter()

    @property
    def num_refused_writes(self) -> Mapping[RefusalCode, int]:
        """Streams ended by a refusal, by its code; 0 for a code that never came. Only grows."""
        return self._num_refused_writes

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the method; call before the server starts."""
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    async def _serve(self, _requests: object, context: _Context) -> None:
        inbox = SegmentInbox(self._max_batch_segments)
        reader = asyncio.create_task(self._read(context, inbox))
        try:
            num_accepted = 0
            while batch := await inbox.take():
                async with bounded_call(context, self._max_wait_s):
                    await self._sink.accept(batch)
                num_accepted += len(batch)
                await context.write(encode_accepted(num_accepted))
            await reader  # raises what ended the stream early
        except Refused as refusal:
            self._num_refused_writes[refusal.code] += 1
            await context.write(encode_refused(refusal))
            await asyncio.sleep(self._linger_s)  # cut short by the sender's leaving, which cancels this task
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, context: _Context, inbox: SegmentInbox) -> None:
        """Fill ``inbox`` with checked segments until the stream ends. Raises ``Refused`` for the frame that broke a rule."""
        attempt: tuple[str, int] | None = None
        try:
            while (frame := await self._next_frame(context)) is not None:
                segment = decode_frame(frame)
                attempt = attempt or (segment.reservation_id, segment.attempt)
                if (segment.reservation_id, segment.attempt) != attempt:
                    raise Refused(RefusalCode.MALFORMED, "Frames of two attempts came on one stream; it may carry one.")
                await inbox.put(segment)
        finally:
            inbox.end()

    async def _next_frame(self, context: _Context) -> bytes | None:
        try:
            async with asyncio.timeout(self._max_idle_s):
                frame = await context.read()
        except TimeoutError:
            return None  # the sender, if it still lives, opens another stream
        return frame if isinstance(frame, bytes) else None  # gRPC's end mark is no bytes
