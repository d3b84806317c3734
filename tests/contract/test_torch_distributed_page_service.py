"""The receiver of the path over torch.distributed against senders that lie: a refusal or an end each time, no crash, nothing
written, nothing kept."""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from kv_transfer.hold_off import HoldOff
from kv_transfer.page_answer import decode_answer
from kv_transfer.page_frame import HEADER_BYTES, MAX_PAYLOAD_BYTES, encode_header
from kv_transfer.page_transport import Segment
from kv_transfer.pair_call import PairCall
from kv_transfer.pair_group import MAX_SLOTS, SLOT_BYTES, PairGroup, Rank
from kv_transfer.pair_handshake import PairHello, PairWelcome, encode_announcement, print_of
from kv_transfer.pair_thread import PairThread
from kv_transfer.torch_distributed_page_service import TorchDistributedPageService
from kv_transfer.torch_distributed_page_transport import TorchDistributedPageTransport
from serving_core.clock import MonotonicClock
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.ids import Incarnation, ReservationId
from tests.contract.page_path import (
    PATIENCE_S,
    STALL_TIMEOUT_S,
    TorchDistributedPath,
    assert_no_leaks,
    cut_page,
    make_ticket,
    until,
)

NUM_SLOTS = 4
TICKET = make_ticket()


@pytest_asyncio.fixture
async def path() -> AsyncIterator[TorchDistributedPath]:
    opened = TorchDistributedPath(PATIENCE_S)
    await opened.mend_way()
    yield opened
    await opened.close()
    await assert_no_leaks()


class RawSender:
    """Says and sends what it likes, with no regard to credits or answers."""

    def __init__(self, address: str) -> None:
        self._host = address.rpartition(":")[0]
        self.call = PairCall(address)
        self.thread = PairThread()
        self.group = PairGroup(
            Rank.SENDER, device="cpu", num_slots=NUM_SLOTS, connect_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S
        )
        self._num_sent = 0

    async def meet(self, *, proof: bytes | None = None) -> None:
        await self.call.send(hello().encode())
        welcome = PairWelcome.decode(await self.call.receive())
        await self.thread.call(self.group.allocate)
        await self.thread.call(lambda: self.group.join(self._host, welcome.port))
        await self.thread.call(lambda: self.group.connect(self._host, welcome.name.hex()))
        await self.thread.call(lambda: self.group.prove(proof or welcome.sender_proof, welcome.receiver_proof))
        assert await self.answer() == 0

    async def announce(self, *headers: bytes) -> None:
        await self.call.send(encode_announcement(headers))

    async def send(self, payload: memoryview) -> None:
        """Not waited for: the receiver may never take it."""
        number = self._num_sent
        self._num_sent += 1
        self.group.fill(number, payload)
        sending = self.thread.call(lambda: self.group.send(number, (payload.nbytes,)))
        sending.add_done_callback(_forget)

    async def send_segments(self, *segments: Segment) -> None:
        for segment in segments:
            await self.send(segment.payload)
            await self.announce(encode_header(segment))

    async def answer(self) -> int:
        async with asyncio.timeout(5):
            return decode_answer(await self.call.receive())

    async def refusal(self) -> RefusalCode:
        with pytest.raises(Refused) as refused:
            await self._end()
        return refused.value.code

    async def _end(self) -> None:
        while True:
            await self.answer()

    async def close(self) -> None:
        await self.call.close()
        await self.thread.end(self.group.close)


def _forget(sending: asyncio.Future[None]) -> None:
    if not sending.cancelled():
        sending.exception()


def hello(
    *, num_slots: int = NUM_SLOTS, is_cuda: bool = False, incarnation: Incarnation = TICKET.decode_incarnation
) -> PairHello:
    return PairHello(num_slots=num_slots, is_cuda=is_cuda, incarnation_print=print_of(incarnation))


def segments(attempt: int = 1, ordinals: Sequence[int] = (0,)) -> list[Segment]:
    return [segment for ordinal in ordinals for segment in cut_page(make_ticket(attempt=attempt), ordinal)]


def memory_bytes() -> int:
    """Of this process's address space: what was asked for, touched or not."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * 4096


@pytest_asyncio.fixture
async def sender(path: TorchDistributedPath) -> AsyncIterator[RawSender]:
    raw = RawSender(path.address)
    yield raw
    await raw.close()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"", RefusalCode.MALFORMED),
        (b"?", RefusalCode.MALFORMED),
        (hello().encode()[:-1], RefusalCode.MALFORMED),
        (hello().encode() + b"?", RefusalCode.MALFORMED),
        (b"TWKV" + hello().encode()[4:], RefusalCode.MALFORMED),
        (hello().encode()[:4] + struct.pack("<I", 2) + hello().encode()[8:], RefusalCode.MALFORMED),
        (hello().encode()[:12] + b"\x02" + hello().encode()[13:], RefusalCode.MALFORMED),
        (hello(num_slots=0).encode(), RefusalCode.MALFORMED),
        (hello(num_slots=MAX_SLOTS + 1).encode(), RefusalCode.MALFORMED),
        (hello(num_slots=2**32 - 1).encode(), RefusalCode.MALFORMED),
        (hello(is_cuda=True).encode(), RefusalCode.LAYOUT_MISMATCH),
        (hello(incarnation=Incarnation("another")).encode(), RefusalCode.UNKNOWN_RESERVATION),
    ],
)
async def test_a_hello_that_cannot_be_is_refused_and_costs_nothing(
    path: TorchDistributedPath, sender: RawSender, message: bytes, code: RefusalCode
) -> None:
    await sender.call.send(message)
    assert await sender.refusal() is code
    assert path.service.num_refused_writes == {code: 1}
    assert path.service.num_pairs == 0


async def test_before_it_has_started_nobody_is_let_in(path: TorchDistributedPath, sender: RawSender) -> None:
    await path.service.close()
    await sender.call.send(hello().encode())
    assert await sender.refusal() is RefusalCode.UNKNOWN_RESERVATION


async def test_who_does_not_know_the_secret_is_not_let_in(path: TorchDistributedPath, sender: RawSender) -> None:
    path.sink.reserve(TICKET)
    with pytest.raises(WorkerLost):
        await sender.meet(proof=bytes(16))
    with pytest.raises(WorkerLost, match="does not know its secret"):
        await sender.answer()
    await until(lambda: path.service.num_pairs == 0)
    path.sink.assert_untouched(TICKET)


@pytest.mark.parametrize("size", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, 40 * HEADER_BYTES])
async def test_random_announcements_are_refused(path: TorchDistributedPath, sender: RawSender, size: int) -> None:
    path.sink.reserve(TICKET)
    await sender.meet()
    await sender.call.send(random.Random(20261).randbytes(size))
    assert await sender.refusal() is RefusalCode.MALFORMED
    path.sink.assert_untouched(TICKET)


@pytest.mark.parametrize("num_bytes", [0, MAX_PAYLOAD_BYTES + 1, 2**32 - 1])
async def test_a_length_that_no_slot_has_is_refused_before_anything_is_allocated(
    path: TorchDistributedPath, sender: RawSender, num_bytes: int
) -> None:
    """A length is a field of four bytes: eight GiB cannot even be said."""
    path.sink.reserve(TICKET)
    await sender.meet()
    header = encode_header(segments()[0])
    before = memory_bytes()
    await sender.announce(header[:36] + struct.pack("<I", num_bytes) + header[40:])
    assert await sender.refusal() is RefusalCode.MALFORMED
    assert memory_bytes() - before < 64 << 20
    path.sink.assert_untouched(TICKET)


def flipped(payload: memoryview) -> memoryview:
    return memoryview(bytes([payload[0] ^ 1]) + bytes(payload[1:]))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(flipped, id="flipped"),
        pytest.param(lambda payload: payload[:-1], id="shorter"),
        pytest.param(lambda payload: memoryview(bytes(1) + bytes(payload)), id="longer"),
        pytest.param(lambda _payload: memoryview(bytes(SLOT_BYTES)), id="a whole slot"),
    ],
)
async def test_other_bytes_than_were_announced_are_refused(
    path: TorchDistributedPath, sender: RawSender, change: Callable[[memoryview], memoryview]
) -> None:
    path.sink.reserve(TICKET)
    await sender.meet()
    good, bad = segments()[:2]
    await sender.send_segments(good)
    assert await sender.answer() == 1
    await sender.send(change(bad.payload))
    await sender.announce(encode_header(bad))
    assert await sender.refusal() is RefusalCode.CHECKSUM_MISMATCH
    assert path.sink.num_copies == 1


async def test_more_segments_than_slots_before_an_answer_are_refused(path: TorchDistributedPath, sender: RawSender) -> None:
    path.sink.reserve(TICKET)
    path.sink.gate.clear()
    await sender.meet()
    await sender.send_segments(*[segments()[0]] * (NUM_SLOTS + 1))
    await until(lambda: bool(path.sink.batch_sizes))
    await asyncio.sleep(0.1)  # for those behind the first
    path.sink.gate.set()
    assert await sender.refusal() is RefusalCode.MALFORMED
    assert sum(path.sink.batch_sizes) == NUM_SLOTS


async def test_replayed_segments_change_nothing_and_stale_or_foreign_ones_are_refused(path: TorchDistributedPath) -> None:
    path.sink.reserve(TICKET)
    raw = RawSender(path.address)
    await raw.meet()
    for number, segment in enumerate([*segments(), *segments()]):
        await raw.send_segments(segment)
        assert await raw.answer() == number + 1
    assert path.sink.num_copies == len(segments())
    path.sink.reserve(make_ticket(attempt=2))
    path.sink.num_copies = 0
    await raw.send_segments(segments()[0])
    assert await raw.refusal() is RefusalCode.STALE_ATTEMPT
    await raw.close()
    raw = RawSender(path.address)
    await raw.meet()
    await raw.send_segments(next(cut_page(make_ticket(reservation_id=ReservationId("ff" * 16)), 0)))
    assert await raw.refusal() is RefusalCode.UNKNOWN_RESERVATION
    await raw.close()
    path.sink.assert_untouched(make_ticket(attempt=2))


async def test_two_attempts_may_follow_one_another_and_are_kept_apart(path: TorchDistributedPath, sender: RawSender) -> None:
    path.sink.reserve(TICKET)
    path.sink.gate.clear()
    await sender.meet()
    await sender.send_segments(segments()[0], segments()[1], segments(attempt=2)[0])
    await asyncio.sleep(0.1)
    path.sink.gate.set()
    assert await sender.refusal() is RefusalCode.STALE_ATTEMPT
    assert path.sink.num_copies == 2


async def test_what_is_announced_and_never_comes_ends_the_pair_within_its_deadline() -> None:
    path = TorchDistributedPath(STALL_TIMEOUT_S)
    await path.mend_way()
    path.sink.reserve(TICKET)
    raw = RawSender(path.address)
    await raw.meet()
    started_at = time.monotonic()
    await raw.announce(encode_header(segments()[0]))
    with pytest.raises(WorkerLost, match="UNAVAILABLE"):
        await raw.answer()
    assert STALL_TIMEOUT_S * 0.9 < time.monotonic() - started_at < 3 * STALL_TIMEOUT_S
    await until(lambda: path.service.num_pairs == 0)
    await raw.close()
    await path.close()
    await assert_no_leaks()


async def test_a_silent_call_and_a_sender_that_does_not_come_to_the_meeting_are_ended() -> None:
    path = TorchDistributedPath(PATIENCE_S)
    path.service = TorchDistributedPageService(path.sink, hello_timeout_s=0.3, connect_timeout_s=0.3)
    await path.mend_way()
    silent, absent = PairCall(path.address), PairCall(path.address)
    await absent.send(hello().encode())
    PairWelcome.decode(await absent.receive())
    for call, words in ((silent, "No hello"), (absent, "could not meet")):
        async with asyncio.timeout(5):
            with pytest.raises(WorkerLost, match=words):
                await call.receive()
        await call.close()
    await path.close()
    await assert_no_leaks()


async def test_what_finds_no_room_takes_another_way() -> None:
    path = TorchDistributedPath(PATIENCE_S)
    path.service = TorchDistributedPageService(path.sink, max_pairs=1)
    await path.mend_way()
    ticket = make_ticket(address=path.address)
    async with path.transport.open(ticket):
        with pytest.raises(WorkerLost, match="takes no more"):
            async with path.transport.open(ticket):
                pass
    async with path.transport.open(ticket):  # that of the one before
        assert path.service.num_pairs == 1
    await path.close()
    await assert_no_leaks()


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_closing_while_segments_are_under_way_leaves_nothing(path: TorchDistributedPath, who: str) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    path.sink.gate.clear()

    async def send() -> None:
        async with path.transport.open(ticket) as stream:
            for ordinal in range(ticket.num_prompt_pages):
                for segment in cut_page(ticket, ordinal):
                    await stream.write(segment)
            await stream.flush()

    sending = asyncio.create_task(send())
    await until(lambda: bool(path.sink.batch_sizes))
    started_at = time.monotonic()
    if who == "sender":
        await path.transport.close()
    else:
        await path.service.close()
    with pytest.raises(WorkerLost):
        await sending
    await until(lambda: path.service.num_pairs == 0)
    assert time.monotonic() - started_at < PATIENCE_S / 4
    path.sink.assert_untouched(ticket)


async def test_closing_while_a_pair_is_being_made_leaves_nothing() -> None:
    path = TorchDistributedPath(PATIENCE_S)
    await path.mend_way()
    transport = TorchDistributedPageTransport("127.0.0.1", hold_off=HoldOff(MonotonicClock()))

    async def connect() -> None:
        async with transport.open(make_ticket(address=path.address)):
            pass

    for delay_s in (0.0, 0.001, 0.003, 0.01, 0.03):
        connecting = asyncio.create_task(connect())
        await asyncio.sleep(delay_s)
        connecting.cancel()
        with suppress(asyncio.CancelledError):
            await connecting
    await transport.close()
    await path.close()
    await assert_no_leaks()
