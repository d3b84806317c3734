"""The shared memory path's receiver against senders that lie: a refusal each time, no crash, nothing written, nothing kept."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from kv_transfer.page_answer import decode_answer
from kv_transfer.page_frame import HEADER_BYTES, encode_header
from kv_transfer.page_socket import new_socket, send_hello, socket_name
from kv_transfer.page_transport import Segment
from kv_transfer.shared_memory_page_service import SharedMemoryPageService
from kv_transfer.shared_memory_page_transport import SharedMemoryPageTransport
from kv_transfer.shared_ring import MAX_SLOTS, SLOT_BYTES, SharedRing
from serving_core.errors import RefusalCode, Refused, WorkerLost
from tests.contract.page_path import PATIENCE_S, SharedMemoryPath, assert_no_leaks, cut_page, make_ticket, num_rings, until

NUM_SLOTS = 4


@pytest_asyncio.fixture
async def path() -> AsyncIterator[SharedMemoryPath]:
    opened = SharedMemoryPath(PATIENCE_S)
    await opened.mend_way()
    yield opened
    await opened.close()
    await assert_no_leaks()


class RawSender:
    """Sends what it likes, with no regard to credits or answers."""

    def __init__(self, path: SharedMemoryPath) -> None:
        self.connection = new_socket()
        self.connection.connect(socket_name(path.address, make_ticket().decode_incarnation))
        self.ring, self.file = SharedRing.create(NUM_SLOTS)
        self._num_sent = 0

    async def greet(self) -> None:
        send_hello(self.connection, self.file, NUM_SLOTS)
        assert await self.answer() == 0

    async def answer(self) -> int:
        """The next answer; -1 at the end. Raises like ``decode_answer``."""
        async with asyncio.timeout(5):
            answer = await asyncio.get_running_loop().sock_recv(self.connection, 4096)
        return decode_answer(answer) if answer else -1

    async def send(self, segment: Segment, header: bytes | None = None) -> None:
        self.ring.write(self._num_sent, segment.payload)
        self._num_sent += 1
        await self.send_raw(encode_header(segment) if header is None else header)

    async def send_raw(self, message: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, message)

    async def refusal(self) -> RefusalCode:
        with pytest.raises(Refused) as refused:
            await self._end()
        return refused.value.code

    async def _end(self) -> None:
        while await self.answer() >= 0:
            pass

    def close(self) -> None:
        self.connection.close()
        self.ring.close()
        os.close(self.file)


@pytest_asyncio.fixture
async def sender(path: SharedMemoryPath) -> AsyncIterator[RawSender]:
    raw = RawSender(path)
    yield raw
    raw.close()


def segments(attempt: int = 1, ordinals: Sequence[int] = (0,)) -> list[Segment]:
    return [segment for ordinal in ordinals for segment in cut_page(make_ticket(attempt=attempt), ordinal)]


def hello(magic: bytes = b"TWKS", version: int = 2, num_slots: int = NUM_SLOTS, proof: bytes = bytes(32)) -> bytes:
    return struct.pack("<4sII32s", magic, version, num_slots, proof)


def memory_file(num_bytes: int, *, is_sealable: bool = False) -> int:
    file = os.memfd_create("test", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if is_sealable else 0))
    os.ftruncate(file, num_bytes)
    return file


@pytest.mark.parametrize(
    "message",
    [
        b"?",
        hello()[:-1],
        hello() + b"?",
        hello(magic=b"TWKV"),
        hello(version=3),
        hello(proof=bytes(31) + b"?"),
        hello(num_slots=0),
        hello(num_slots=NUM_SLOTS + 1),
        hello(num_slots=MAX_SLOTS + 1),
        hello(num_slots=2**32 - 1),
    ],
)
async def test_a_hello_that_breaks_the_format_is_refused(path: SharedMemoryPath, sender: RawSender, message: bytes) -> None:
    socket.send_fds(sender.connection, [message], [sender.file])
    assert await sender.refusal() is RefusalCode.MALFORMED
    assert path.service.num_refused_writes == {RefusalCode.MALFORMED: 1}


async def test_a_hello_without_a_ring_is_refused(sender: RawSender) -> None:
    await sender.send_raw(hello())
    assert await sender.refusal() is RefusalCode.MALFORMED


async def test_only_a_sealed_memory_file_of_the_right_size_is_a_ring(path: SharedMemoryPath) -> None:
    ring_bytes = NUM_SLOTS * SLOT_BYTES
    read_end, write_end = os.pipe()
    unsealed = (memory_file(ring_bytes), memory_file(ring_bytes, is_sealable=True), memory_file(ring_bytes - 1))
    for file in (read_end, write_end, *unsealed):
        raw = RawSender(path)
        send_hello(raw.connection, file, NUM_SLOTS)
        assert await raw.refusal() is RefusalCode.MALFORMED
        raw.close()
        os.close(file)


async def test_descriptors_that_nobody_asked_for_are_dropped(path: SharedMemoryPath, sender: RawSender) -> None:
    path.sink.reserve(make_ticket())
    num_before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(sender.connection, [hello()], [sender.file] * 50)
    assert await sender.answer() == 0
    segment = segments()[0]
    sender.ring.write(0, segment.payload)
    socket.send_fds(sender.connection, [encode_header(segment)], [sender.file] * 50)
    assert await sender.answer() == 1
    assert len(os.listdir("/proc/self/fd")) <= num_before + 2  # the connection and its mapping


async def test_random_headers_are_refused(path: SharedMemoryPath) -> None:
    path.sink.reserve(make_ticket())
    chance = random.Random(20251)
    for size in (1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, 4096):
        raw = RawSender(path)
        await raw.greet()
        await raw.send_raw(chance.randbytes(size))
        assert await raw.refusal() is RefusalCode.MALFORMED
        raw.close()
    path.sink.assert_untouched(make_ticket())


@pytest.mark.parametrize("num_bytes", [0, SLOT_BYTES + 1, 2**32 - 1])
async def test_a_length_that_no_slot_has_is_refused_unread(path: SharedMemoryPath, sender: RawSender, num_bytes: int) -> None:
    path.sink.reserve(make_ticket())
    await sender.greet()
    header = encode_header(segments()[0])
    await sender.send_raw(header[:36] + struct.pack("<I", num_bytes) + header[40:])
    assert await sender.refusal() is RefusalCode.MALFORMED
    path.sink.assert_untouched(make_ticket())


async def test_other_bytes_than_the_checksum_was_taken_of_are_refused(path: SharedMemoryPath, sender: RawSender) -> None:
    path.sink.reserve(make_ticket())
    await sender.greet()
    good, bad = segments()[:2]
    await sender.send(good)
    await sender.send(bad, encode_header(bad)[:-1] + b"\0")
    assert await sender.refusal() is RefusalCode.CHECKSUM_MISMATCH
    assert path.sink.num_copies == 1


async def test_bytes_that_change_after_the_check_change_nothing(path: SharedMemoryPath, sender: RawSender) -> None:
    ticket = make_ticket()
    path.sink.reserve(ticket)
    path.sink.gate.clear()
    await sender.greet()
    # 1. A page is checked, and the sink is about to copy it.
    for segment in segments():
        await sender.send(segment)
    await until(lambda: sum(path.sink.batch_sizes) >= 1)
    await asyncio.sleep(0.05)  # for those behind the first
    # 2. The sender overwrites its ring.
    for number in range(NUM_SLOTS):
        sender.ring.write(number, memoryview(b"\xff" * SLOT_BYTES))
    # 3. The page has what was checked.
    path.sink.gate.set()
    await until(lambda: path.sink.num_copies == len(segments()))
    page = path.sink.pages[ticket.reservation_id][0]
    assert bytes(page) == b"".join(bytes(segment.payload) for segment in segments())


async def test_more_segments_than_slots_before_an_answer_are_refused(path: SharedMemoryPath, sender: RawSender) -> None:
    path.sink.reserve(make_ticket())
    path.sink.gate.clear()
    await sender.greet()
    for _ in range(NUM_SLOTS + 1):
        await sender.send(segments()[0])
    await until(lambda: bool(path.sink.batch_sizes))
    await asyncio.sleep(0.05)
    path.sink.gate.set()
    assert await sender.refusal() is RefusalCode.MALFORMED
    assert sum(path.sink.batch_sizes) == NUM_SLOTS


async def test_replayed_segments_change_nothing_and_stale_ones_are_refused(path: SharedMemoryPath, sender: RawSender) -> None:
    path.sink.reserve(make_ticket())
    await sender.greet()
    for number, segment in enumerate([*segments(), *segments()]):
        await sender.send(segment)
        assert await sender.answer() == number + 1
    assert path.sink.num_copies == len(segments())
    path.sink.reserve(make_ticket(attempt=2))
    path.sink.num_copies = 0
    await sender.send(segments()[0])
    assert await sender.refusal() is RefusalCode.STALE_ATTEMPT
    path.sink.assert_untouched(make_ticket(attempt=2))


async def test_attempts_may_follow_one_another_on_one_connection(path: SharedMemoryPath, sender: RawSender) -> None:
    path.sink.reserve(make_ticket())
    path.sink.gate.clear()
    await sender.greet()
    # the sink gets each attempt's segments apart, although they came together
    await sender.send(segments()[0])
    await sender.send(segments()[1])
    await sender.send(segments(attempt=2)[0])
    await asyncio.sleep(0.05)
    path.sink.gate.set()
    assert await sender.refusal() is RefusalCode.STALE_ATTEMPT
    assert path.sink.num_copies == 2


async def test_another_user_gets_nothing(path: SharedMemoryPath, monkeypatch: pytest.MonkeyPatch) -> None:
    path.sink.reserve(make_ticket())
    raw = RawSender(path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    send_hello(raw.connection, raw.file, NUM_SLOTS)
    assert await raw.refusal() is RefusalCode.MALFORMED
    raw.close()
    # nor is another user's receiver given anything
    with pytest.raises(WorkerLost, match="another user"):
        async with path.transport.open(make_ticket(address=path.address)):
            pass


async def test_a_silent_connection_is_closed_and_a_crowd_waits() -> None:
    path = SharedMemoryPath(PATIENCE_S)
    path.service = SharedMemoryPageService(path.sink, max_connections=1, hello_timeout_s=0.4)
    await path.mend_way()
    silent = RawSender(path)
    await asyncio.sleep(0.05)
    # 1. Whoever finds no room is not answered, and goes another way.
    hurried = SharedMemoryPageTransport(connect_timeout_s=0.1)
    with pytest.raises(WorkerLost, match="did not answer"):
        async with hurried.open(make_ticket(address=path.address)):
            pass
    # 2. The silent one is sent away, which makes room.
    assert await silent.answer() == -1
    async with path.transport.open(make_ticket(address=path.address)):
        assert num_rings() > 0
    silent.close()
    await path.close()
    await assert_no_leaks()


@pytest.mark.parametrize("num_turns", range(6))
async def test_closing_as_a_sender_comes_leaves_no_socket(path: SharedMemoryPath, num_turns: int) -> None:
    """A socket that nobody closes is an error of the test, once it is collected."""
    with new_socket() as sender:
        sender.connect(socket_name(path.address, make_ticket().decode_incarnation))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await path.break_way()
    gc.collect()
