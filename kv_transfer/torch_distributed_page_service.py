"""The receiving end of the page path over torch.distributed: takes announced segments from the other rank of a pair, checks
them, hands them to the sink, answers. It owns no page.

One gRPC call is one pair, and carries attempt after attempt: 1. hello; 2. a store is opened where this worker serves, and the
welcome says where and under which name the two ends meet; 3. both show over the group what only the call could have told them;
4. a segment's header is announced and checked, and only then a receive is posted for its payload, into a slot of the pair's;
5. what has arrived is checked against the header's checksum; 6. the sink takes all that are there, while the next ones come;
7. the answer says how many were accepted, in order, which gives their slots back; 8. the first refusal is answered and ends the
pair. When the call ends, however it does, so does the pair.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from typing import TypeAlias

import grpc
import grpc.aio

from kv_transfer.page_answer import encode_accepted, encode_refused
from kv_transfer.page_transport import PageSink, Segment
from kv_transfer.pair_call import METHOD, SERVICE
from kv_transfer.pair_group import MAX_SLOTS, PairGroup, Rank
from kv_transfer.pair_handshake import PairHello, PairWelcome, decode_announcement, print_of
from kv_transfer.pair_thread import PairThread
from kv_transfer.segment_inbox import SegmentInbox
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.ids import Incarnation
from serving_core.rpc.bounded_call import bounded_call

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class TorchDistributedPageService:
    """Serves one decode worker's ``sink`` to whoever can reach its gRPC server and the ports that torch.distributed opens
    beside it. Lives on one event loop.

    ``device`` is where bytes cross, the same kind at both ends. At most ``max_pairs`` are there at a time, each with a thread
    and the memory of its slots; senders above that take another way. A hello must come within ``hello_timeout_s``, the sender
    to the meeting within ``connect_timeout_s``, an announced payload within ``stall_timeout_s``, and the sink must take
    segments within ``max_wait_s``; ``linger_s`` bounds the wait for a refused sender to leave. A pair that is idle stays, since
    its call ends with its sender's process.
    """

    def __init__(
        self,
        sink: PageSink,
        *,
        device: str = "cpu",
        max_pairs: int = 32,
        hello_timeout_s: float = 2.0,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 5.0,
        max_wait_s: float = 30.0,
        linger_s: float = 1.0,
    ) -> None:
        self._sink = sink
        self._device = device
        self._max_pairs = max_pairs
        self._hello_timeout_s = hello_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._max_wait_s = max_wait_s
        self._linger_s = linger_s
        self._num_refused_writes: Counter[RefusalCode] = Counter()
        self._serving: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Future[None]] = set()
        self._host = ""
        self._incarnation_print: bytes | None = None  # none until it has started

    @property
    def num_refused_writes(self) -> Mapping[RefusalCode, int]:
        """Pairs ended by a refusal, by its code; 0 for a code that never came. Only grows."""
        return self._num_refused_writes

    @property
    def num_pairs(self) -> int:
        """Pairs that hold a thread and memory, those that are ending included."""
        return len(self._serving) + len(self._endings)

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the method; call before the server starts."""
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    def start(self, address: str, incarnation: Incarnation) -> None:
        """Take senders that mean this incarnation, which serves at ``address``."""
        self._host = address.rpartition(":")[0]
        self._incarnation_print = print_of(incarnation)

    async def close(self) -> None:
        """End every pair, and wait for its thread at most as long as one message may take: only a frozen peer takes it so long.
        Idempotent; ``start`` may follow."""
        self._incarnation_print = None
        for pair in self._serving:
            pair.cancel()
        if self._serving:
            await asyncio.wait(tuple(self._serving))
        if self._endings:
            await asyncio.wait(self._endings, timeout=self._stall_timeout_s)

    async def _serve(self, _requests: object, context: _Context) -> None:
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                hello = PairHello.decode(await _read(context))
            self._check(hello)
            await self._serve_until_closed(hello, context)
        except Refused as refusal:
            await self._refuse(refusal, context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"No hello came within {self._hello_timeout_s:g} s.")
        except WorkerLost as lost:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(lost))

    def _check(self, hello: PairHello) -> None:
        if hello.incarnation_print != self._incarnation_print:
            raise Refused(RefusalCode.UNKNOWN_RESERVATION, "The ticket is of another incarnation of this worker.")
        if hello.is_cuda != self._device.startswith("cuda"):
            ours, theirs = ("not on CUDA", "is") if hello.is_cuda else ("on CUDA", "is not")
            raise Refused(RefusalCode.LAYOUT_MISMATCH, f"Its pages are {ours}, and the sender's {theirs}.")
        if not 1 <= hello.num_slots <= MAX_SLOTS:
            raise Refused(RefusalCode.MALFORMED, f"A pair of {hello.num_slots} slots is outside 1 to {MAX_SLOTS}.")
        if self.num_pairs >= self._max_pairs:
            raise Refused(RefusalCode.RESOURCE_EXHAUSTED, f"It has {self.num_pairs} pairs, and takes no more.")

    async def _serve_until_closed(self, hello: PairHello, context: _Context) -> None:
        # In a task of its own, since gRPC reports a call as broken whose task was cancelled by anybody but its caller.
        pair = asyncio.create_task(self._serve_pair(hello, context))
        self._serving.add(pair)
        try:
            await asyncio.wait((pair,))
        finally:
            pair.cancel()
            await asyncio.wait((pair,))
            self._serving.discard(pair)
        if pair.cancelled():
            raise WorkerLost("The worker is stopping.")
        pair.result()

    async def _serve_pair(self, hello: PairHello, context: _Context) -> None:
        thread = PairThread()
        group = PairGroup(
            Rank.RECEIVER,
            device=self._device,
            num_slots=hello.num_slots,
            connect_timeout_s=self._connect_timeout_s,
            timeout_s=self._stall_timeout_s,
        )
        try:
            await self._meet(thread, group, context)
            await context.write(encode_accepted(0))
            await _PairReceiver(thread, group, self._sink, context, self._max_wait_s).serve()
        except Refused as refusal:
            await self._refuse(refusal, context)  # while the group is there, so that the sender learns nothing else first
        finally:
            ending = thread.end(group.close)
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _refuse(self, refusal: Refused, context: _Context) -> None:
        self._num_refused_writes[refusal.code] += 1
        await context.write(encode_refused(refusal))
        await asyncio.sleep(self._linger_s)  # cut short by the sender's leaving, which cancels this task

    async def _meet(self, thread: PairThread, group: PairGroup, context: _Context) -> None:
        host = self._host
        await thread.call(group.allocate)
        welcome = PairWelcome.draw(await thread.call(lambda: group.listen(host)))
        await context.write(welcome.encode())
        await thread.call(lambda: group.connect(host, welcome.name.hex()))
        await thread.call(lambda: group.prove(welcome.receiver_proof, welcome.sender_proof))


class _PairReceiver:
    """One pair's, once its ends have met."""

    def __init__(self, thread: PairThread, group: PairGroup, sink: PageSink, context: _Context, max_wait_s: float) -> None:
        self._thread = thread
        self._group = group
        self._sink = sink
        self._context = context
        self._max_wait_s = max_wait_s
        self._inbox = SegmentInbox(group.num_slots)
        self._num_read = 0
        self._num_accepted = 0

    async def serve(self) -> None:
        """Returns when the sender has left. Raises ``Refused`` or ``WorkerLost``."""
        reader = asyncio.create_task(self._read())
        try:
            while batch := await self._inbox.take():
                async with bounded_call(self._context, self._max_wait_s):
                    await self._accept(batch)
                await self._context.write(encode_accepted(self._num_accepted))
            await reader  # raises what ended the pair early
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _accept(self, batch: list[Segment]) -> None:
        for _, segments in groupby(batch, lambda segment: (segment.reservation_id, segment.attempt)):
            of_one_attempt = list(segments)
            await self._sink.accept(of_one_attempt)
            self._num_accepted += len(of_one_attempt)

    async def _read(self) -> None:
        """Fill the inbox with checked segments until the sender leaves. Raises ``Refused`` for the one that broke a rule."""
        try:
            while message := await _read(self._context):
                await self._take(message)
        finally:
            self._inbox.end()

    async def _take(self, announcement: bytes) -> None:
        num_unanswered = self._num_read - self._num_accepted
        headers = decode_announcement(announcement, max_headers=self._group.num_slots - num_unanswered)
        lengths = [header.num_bytes for header in headers]
        await self._thread.call(partial(self._group.receive, self._num_read, lengths))
        for header in headers:
            slot = self._group.slot(self._num_read, header.num_bytes)
            self._num_read += 1
            await self._inbox.put(header.check(slot))


async def _read(context: _Context) -> bytes:
    """The next message; nothing at the end."""
    message = await context.read()
    return message if isinstance(message, bytes) else b""  # gRPC's end mark is no bytes
