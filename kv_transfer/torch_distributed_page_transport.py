"""The sending end of the page path over torch.distributed: payloads between the two ranks of a pair, headers and answers on a
gRPC call.

It owns pairs, never pages: a segment is copied into its slot before ``write`` returns. Pairs are pooled, because making one
takes far longer than most of what is sent through it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from kv_transfer.hold_off import HoldOff
from kv_transfer.page_answer import decode_answer
from kv_transfer.page_frame import encode_header
from kv_transfer.page_transport import PageStream, Segment
from kv_transfer.pair_call import PairCall
from kv_transfer.pair_group import PairGroup, Rank
from kv_transfer.pair_handshake import PairHello, PairWelcome, encode_announcement, print_of
from kv_transfer.pair_thread import PairThread
from kv_transfer.stream_credits import StreamCredits
from kv_transfer.stream_pool import Receiver, StreamPool
from serving_core.errors import Refused, WorkerLost
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.transfer_ticket import TransferTicket

SEGMENTS_AT_ONCE = 8
"""In one announcement, unless the sender has to wait before: a message over gRPC costs more than a segment."""


class TorchDistributedPageTransport:
    """``PageTransport`` over pairs of torch.distributed. Lives on one event loop.

    ``host`` is this worker's own address, where the other rank of a pair may have to reach it; ``device`` is where bytes cross,
    the same kind at both ends. ``max_unanswered_segments`` are the credits of a stream, and its pair's slots.
    ``stall_timeout_s`` bounds every wait for the receiver, ``connect_timeout_s`` that for a new pair. At most ``max_idle`` of
    them wait for another attempt. After a failure ``hold_off`` keeps the next streams to that receiver from being opened here,
    so that another transport takes them, the interrupted hand-off's own among them.
    """

    name = "torch_distributed"

    def __init__(
        self,
        host: str,
        *,
        hold_off: HoldOff,
        token: ClusterToken = OPEN,
        device: str = "cpu",
        max_unanswered_segments: int = 16,
        stall_timeout_s: float = 5.0,
        connect_timeout_s: float = 5.0,
        max_idle: int = 4,
    ) -> None:
        self._host = host
        self._hold_off = hold_off
        self._token = token
        self._device = device
        self._max_unanswered_segments = max_unanswered_segments
        self._stall_timeout_s = stall_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._pool = StreamPool(self._connect, max_idle=max_idle)

    @asynccontextmanager
    async def open(self, ticket: TransferTicket) -> AsyncIterator[PageStream]:
        """A stream to the ticket's decode worker, with its pair when the context is entered: raises ``WorkerLost`` with the
        reason when there cannot be one. Nothing was sent then."""
        async with self._pool.use(ticket) as pair:
            try:
                yield pair
            finally:
                self._note_end(pair)

    async def close(self) -> None:
        """Release every pair; streams still open raise ``WorkerLost``. Waits for the pairs' threads, at most as long as one
        message may take: only a frozen peer takes it so long. Idempotent."""
        await self._pool.close(self._stall_timeout_s)

    def _note_end(self, pair: _Pair) -> None:
        if pair.is_broken and not self._pool.is_closed:
            self._hold_off.fail(pair.receiver.address, pair.receiver.incarnation)
        elif pair.is_settled:
            self._hold_off.succeed(pair.receiver.address, pair.receiver.incarnation)

    async def _connect(self, ticket: TransferTicket) -> _Pair:
        receiver = Receiver.of(ticket)
        if (wait_s := self._hold_off.remaining_s(receiver.address, receiver.incarnation)) > 0:
            raise _unreachable(ticket, f"it failed just now and is tried again in {math.ceil(wait_s)} s")
        group = PairGroup(
            Rank.SENDER,
            device=self._device,
            num_slots=self._max_unanswered_segments,
            connect_timeout_s=self._connect_timeout_s,
            timeout_s=self._stall_timeout_s,
        )
        call, thread = PairCall(receiver.address, self._token), PairThread()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._meet(receiver, call, thread, group)
        except BaseException as error:
            self._pool.release(_end(call, thread, group))
            if not isinstance(error, TimeoutError | Refused | WorkerLost):
                raise
            self._hold_off.fail(receiver.address, receiver.incarnation)
            is_silent = isinstance(error, TimeoutError)
            reason = f"no pair came about within {self._connect_timeout_s:g} s" if is_silent else str(error).rstrip(".")
            raise _unreachable(ticket, reason) from None
        return _Pair(
            receiver,
            call,
            thread,
            group,
            max_unanswered_segments=self._max_unanswered_segments,
            stall_timeout_s=self._stall_timeout_s,
        )

    async def _meet(self, receiver: Receiver, call: PairCall, thread: PairThread, group: PairGroup) -> None:
        await thread.call(group.allocate)
        hello = PairHello(
            num_slots=self._max_unanswered_segments,
            is_cuda=self._device.startswith("cuda"),
            incarnation_print=print_of(receiver.incarnation),
        )
        with suppress(WorkerLost):  # why, the answer says
            await call.send(hello.encode())
        welcome = PairWelcome.decode(await call.receive())
        await thread.call(lambda: group.join(receiver.host, welcome.port))
        await thread.call(lambda: group.connect(self._host, welcome.name.hex()))
        await thread.call(lambda: group.prove(welcome.sender_proof, welcome.receiver_proof))
        decode_answer(await call.receive())


class _Pair:
    """One pair, as a ``PageStream``. Tasks of its own announce segments, several at once, and read answers, so that a refusal
    is known however many segments are under way."""

    def __init__(
        self,
        receiver: Receiver,
        call: PairCall,
        thread: PairThread,
        group: PairGroup,
        *,
        max_unanswered_segments: int,
        stall_timeout_s: float,
    ) -> None:
        self.receiver = receiver
        self._thread = thread
        self._group = group
        self._call = call
        self._stall_timeout_s = stall_timeout_s
        self._credits = StreamCredits(
            receiver.address, max_unanswered_segments=max_unanswered_segments, stall_timeout_s=stall_timeout_s
        )
        self._unannounced: list[bytes] = []
        self._lengths: list[int] = []  # of the unannounced
        self._num_announced = 0
        self._has_news = asyncio.Event()
        self._announcer = asyncio.create_task(self._announce())
        self._reader = asyncio.create_task(self._read_answers())

    @property
    def num_accepted(self) -> int:
        return self._credits.num_accepted

    @property
    def is_settled(self) -> bool:
        """See ``StreamCredits``: fit for another attempt."""
        return self._credits.is_settled

    @property
    def is_broken(self) -> bool:
        """See ``StreamCredits``."""
        return self._credits.is_broken

    async def write(self, segment: Segment) -> None:
        await self._credits.wait_for_credit()
        self._group.fill(self._credits.num_written, segment.payload)
        header = encode_header(segment)  # after the copy, which has brought the payload into the cache
        self._credits.use()
        self._unannounced.append(header)
        self._lengths.append(segment.payload.nbytes)
        self._has_news.set()
        if len(self._unannounced) >= SEGMENTS_AT_ONCE:
            await asyncio.sleep(0)  # so that they go now, and not when the sender has to wait

    async def flush(self) -> None:
        await self._credits.wait_until_accepted()

    async def release(self) -> None:
        """End the call at once, whatever is under way, then thread and group with what they are doing. Idempotent."""
        self._credits.end(WorkerLost("The page stream was released."))
        tasks = (self._announcer, self._reader)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await _end(self._call, self._thread, self._group)

    async def _announce(self) -> None:
        try:
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                headers, lengths, first = self._unannounced, self._lengths, self._num_announced
                self._unannounced, self._lengths = [], []
                self._num_announced += len(headers)
                # Sent before it is announced: so the receiver, which posts its receive after that, never waits for nothing.
                self._thread.call(partial(self._group.send, first, lengths)).add_done_callback(self._note_sent)
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._call.send(encode_announcement(headers))
        except TimeoutError:
            self._credits.end(WorkerLost(f"{self.receiver.address} took no announcement for {self._stall_timeout_s} s."))
        except WorkerLost as lost:
            # The call is over, so the reader is about to know why; it may be a refusal, which outranks the broken write.
            await asyncio.wait((self._reader,))
            self._credits.end(lost)

    def _note_sent(self, sending: asyncio.Future[None]) -> None:
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._credits.end(error if isinstance(error, WorkerLost) else WorkerLost(f"The pair broke ({error})."))

    async def _read_answers(self) -> None:
        try:
            while True:
                self._credits.take_answer(await self._call.receive())
        except (Refused, WorkerLost) as error:
            self._credits.end(error)


async def _end(call: PairCall, thread: PairThread, group: PairGroup) -> None:
    await call.close()
    if not thread.is_ended:
        await thread.end(group.close)


def _unreachable(ticket: TransferTicket, reason: str) -> WorkerLost:
    return WorkerLost(
        f"{ticket.decode_worker_id} at {ticket.decode_address} cannot be reached over torch.distributed: {reason}."
    )
