"""On the three ways that pages come in, from a peer that knows the tickets: nothing that it sends here may be taken, and what
is sent again may change nothing."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import socket
import struct
from contextlib import ExitStack, suppress
from dataclasses import replace

import google_crc32c
import numpy as np

from kv_transfer.page_answer import decode_answer
from kv_transfer.page_frame import HEADER_BYTES, MAX_FRAME_BYTES, encode_frame, encode_header
from kv_transfer.page_socket import new_socket, send_hello, socket_name
from kv_transfer.pair_call import PairCall
from kv_transfer.pair_group import PairGroup, Rank
from kv_transfer.pair_handshake import PairHello, PairWelcome, encode_announcement, print_of
from kv_transfer.pair_thread import PairThread
from kv_transfer.shared_ring import SLOT_BYTES, SharedRing
from serving_core.errors import Refused, WorkerLost
from serving_core.ids import ReservationId
from tests.fuzz.noise import EDGES, spoil_bytes
from tests.fuzz.target import ATTEMPT, HeldReservation, Target, hang_up

NUM_SLOTS = 4
ANSWER_S = 10.0
FAR_EDGES = EDGES[3:]
"""Beyond every page of a held reservation, and every attempt."""


async def bad_frames(target: Target, chance: random.Random) -> None:
    """gRPC: frames that came before, in any order, then one that is wrong, then such as would be right."""
    held = chance.choice(target.held)
    replayed = [encode_frame(segment) for segment in chance.choices(held.arrived, k=chance.randrange(4))]
    behind = [encode_frame(segment) for segment in held.missing[: chance.randrange(3)]]
    frames = [*replayed, bad_frame(held, chance), *behind]
    num_accepted, error = await target.send_frames(held.worker.hello.address, frames)
    assert error is not None, f"{num_accepted} frames were accepted"
    assert num_accepted <= len(replayed)


async def replayed_frames(target: Target, chance: random.Random) -> None:
    """gRPC: all that arrived, again and in another order; the sender may leave in the middle."""
    held = chance.choice(target.held)
    frames = [encode_frame(segment) for segment in chance.sample(held.arrived * 2, k=len(held.arrived))]
    sending = asyncio.create_task(target.send_frames(held.worker.hello.address, frames))
    if chance.random() < 0.3:
        await asyncio.sleep(chance.random() * 0.01)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    else:
        assert await sending == (len(frames), None)


def bad_frame(held: HeldReservation, chance: random.Random) -> bytes:
    """What the page port has to refuse, or gRPC before it."""
    match chance.randrange(6):
        case 0:
            return spoil_bytes(chance, encode_frame(chance.choice(held.arrived)))
        case 1:
            return b"TWKV" + bytes(chance.choice((0, HEADER_BYTES - 4, MAX_FRAME_BYTES, 3 << 20)))
        case _:
            return resealed(*bad_segment(held, chance))


def bad_segment(held: HeldReservation, chance: random.Random) -> tuple[bytes, bytes]:
    """A header that is wrong in one thing, its checksum right but not yet that, and the payload."""
    page_bytes = held.ticket.layout.page_bytes
    segment = chance.choice(held.arrived)
    edge = chance.choice(FAR_EDGES)
    match chance.randrange(6):
        case 0:
            attempt = chance.choice((0, 1, ATTEMPT + 1, *FAR_EDGES))
            segment = replace(chance.choice((*held.arrived, *held.missing)), attempt=attempt)
        case 1:
            stranger = ReservationId(chance.randbytes(16).hex())
            segment = replace(chance.choice((*held.arrived, *held.missing)), reservation_id=stranger)
        case 2:
            segment = replace(segment, page_ordinal=edge)
        case 3:
            segment = replace(segment, offset=chance.choice((page_bytes - 1, page_bytes, 2**32 - 1)))
        case 4:  # half of it has arrived, cut otherwise
            last = held.arrived[1]
            segment = replace(last, offset=last.offset + chance.randrange(1, last.payload.nbytes))
        case _:
            header = encode_header(segment)
            place = chance.choice((36, 40, 44))  # length, and the two of the runs
            header = header[:place] + struct.pack("<I", edge) + header[place + 4 :]
            return header, bytes(segment.payload)
    return encode_header(segment), bytes(segment.payload)


def resealed(header: bytes, payload: bytes) -> bytes:
    """A frame with the checksum of what it holds."""
    checksum = google_crc32c.extend(google_crc32c.value(header[:-4]), np.frombuffer(payload, dtype=np.uint8))
    return header[:-4] + struct.pack("<I", checksum) + payload


# Shared memory


async def bad_ring(target: Target, chance: random.Random) -> None:
    """A hello that is none, a ring that is none, then headers and payloads that are wrong; or nothing at all."""
    held = target.held[0]
    with ExitStack() as stack:
        connection = stack.enter_context(new_socket())
        connection.connect(socket_name(held.worker.hello.address, held.ticket.decode_incarnation))
        ring, file = SharedRing.create(NUM_SLOTS)
        stack.callback(os.close, file)
        stack.callback(ring.close)
        if chance.random() < 0.4:
            _send_bad_hello(connection, file, chance)
        elif chance.random() < 0.9:
            send_hello(connection, file, NUM_SLOTS)
            assert await _next_answer(connection) == 0
            await _send_bad_segments(connection, ring, held, chance)
        else:
            return  # and gone
        if chance.random() < 0.2:
            return
        with suppress(Refused):
            while await _next_answer(connection) is not None:
                pass
            raise AssertionError("the end came without a refusal")


def _send_bad_hello(connection: socket.socket, file: int, chance: random.Random) -> None:
    good = _hello_of_a_ring(file)
    with ExitStack() as stack:
        read_end, write_end = os.pipe()
        stack.callback(os.close, read_end)
        stack.callback(os.close, write_end)
        unsealed = os.memfd_create("noise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        stack.callback(os.close, unsealed)
        os.ftruncate(unsealed, chance.choice((0, 1, NUM_SLOTS * SLOT_BYTES, (NUM_SLOTS + 1) * SLOT_BYTES)))
        if chance.random() < 0.5:
            fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        if chance.random() < 0.5:
            socket.send_fds(connection, [spoil_bytes(chance, good) or b"?"], [file] * chance.randrange(3))
        else:
            socket.send_fds(connection, [good], [chance.choice((read_end, write_end, unsealed))])


def _hello_of_a_ring(file: int) -> bytes:
    """As it would be sent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send_hello(ours, file, NUM_SLOTS)
        return theirs.recv(1024)


async def _send_bad_segments(connection: socket.socket, ring: SharedRing, held: HeldReservation, chance: random.Random) -> None:
    loop = asyncio.get_running_loop()
    num_good = chance.randrange(NUM_SLOTS)
    for number, segment in enumerate(chance.choices(held.arrived, k=num_good)):
        ring.write(number, segment.payload)
        await loop.sock_sendall(connection, encode_header(segment))
    if chance.random() < 0.5:
        header, payload = bad_segment(held, chance)
        frame = resealed(header, payload)
        ring.write(num_good, memoryview(payload))
        header = frame[:HEADER_BYTES]
    else:
        segment = chance.choice((*held.arrived, *held.missing))
        ring.write(num_good, memoryview(spoil_bytes(chance, bytes(segment.payload))[: segment.payload.nbytes].ljust(1)))
        header = spoil_bytes(chance, encode_header(segment)) or b"?"
    with suppress(OSError):
        await loop.sock_sendall(connection, header)


async def _next_answer(connection: socket.socket) -> int | None:
    """None at the end. Raises like ``decode_answer``."""
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await asyncio.get_running_loop().sock_recv(connection, 4096)
    except ConnectionError:
        return None
    return decode_answer(answer) if answer else None


# torch.distributed


async def bad_pair(target: Target, chance: random.Random) -> None:
    """A hello that is none, or one after which nobody comes to the meeting, or noise does."""
    held = target.held[1]
    hello = _hello(held).encode()
    call = PairCall(held.worker.hello.address)
    try:
        if chance.random() < 0.5:
            with suppress(Refused, WorkerLost):
                await call.send(spoil_bytes(chance, hello))
                await _read_to_the_end(call, is_welcome_expected=True)
            return
        with suppress(Refused, WorkerLost):  # it may have too many pairs
            await call.send(hello)
            welcome = PairWelcome.decode(await call.receive())
            if chance.random() < 0.5:
                await _throw_at(welcome.port, chance)
            elif chance.random() < 0.3:
                await call.send(chance.randbytes(HEADER_BYTES))
    finally:
        await call.close()


async def bad_announcements(target: Target, chance: random.Random) -> None:
    """The two ends have met; then come headers that are wrong, or other bytes than announced."""
    held = target.held[1]
    host = held.worker.hello.address.rpartition(":")[0]
    call = PairCall(held.worker.hello.address)
    thread = PairThread()
    group = PairGroup(Rank.SENDER, device="cpu", num_slots=NUM_SLOTS, connect_timeout_s=5.0, timeout_s=2.0)
    try:
        try:
            await call.send(_hello(held).encode())
            welcome = PairWelcome.decode(await call.receive())
            await thread.call(group.allocate)
            await thread.call(lambda: group.join(host, welcome.port))
            await thread.call(lambda: group.connect(host, welcome.name.hex()))
            await thread.call(lambda: group.prove(welcome.sender_proof, welcome.receiver_proof))
        except (Refused, WorkerLost):  # it has too many pairs, or another attack met this one
            return
        segment = chance.choice(held.arrived)
        with suppress(Refused, WorkerLost):
            if chance.random() < 0.5:
                await call.send(spoil_bytes(chance, encode_header(segment)))
            else:
                header, payload = bad_segment(held, chance)
                header = resealed(header, payload)[:HEADER_BYTES]
                payload = payload[: chance.choice((1, len(payload), len(payload)))]
                group.fill(0, memoryview(payload))
                sending = thread.call(lambda: group.send(0, (len(payload),)))
                sending.add_done_callback(_forget)
                await call.send(encode_announcement([header]))
            await _read_to_the_end(call, is_welcome_expected=False)
    finally:
        await call.close()
        await thread.end(group.close)


def _hello(held: HeldReservation) -> PairHello:
    return PairHello(num_slots=NUM_SLOTS, is_cuda=False, incarnation_print=print_of(held.ticket.decode_incarnation))


async def _read_to_the_end(call: PairCall, *, is_welcome_expected: bool) -> None:
    """Raises what ended it."""
    async with asyncio.timeout(ANSWER_S):
        while True:
            message = await call.receive()
            if is_welcome_expected:
                PairWelcome.decode(message)  # spoilt only in the number of its slots
                return
            assert decode_answer(message) == 0, "something was accepted"


async def _throw_at(port: int, chance: random.Random) -> None:
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(chance.randbytes(chance.choice((1, 5, 100, 10_000))))
        await asyncio.sleep(0.01)
        hang_up(writer)


def _forget(sending: asyncio.Future[None]) -> None:
    if not sending.cancelled():
        sending.exception()
