"""Lengths of eight GiB, or the most that their field can say, wherever a length comes from a peer: nothing is allocated."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from kv_transfer.page_answer import decode_answer
from kv_transfer.page_frame import encode_frame, encode_header
from kv_transfer.page_socket import new_socket, send_hello, socket_name
from kv_transfer.pair_call import PairCall
from kv_transfer.pair_handshake import PairHello, PairWelcome, print_of
from kv_transfer.shared_ring import SLOT_BYTES
from llm_engine.load_model import load_model
from serving_core.errors import RefusalCode, Refused
from serving_core.kv_page_layout import KVDType
from tests.fuzz.noise import EIGHT_GIB
from tests.fuzz.socket_attacks import grpc_call, http_request
from tests.fuzz.target import Target, attacked_server, hang_up, memory_peaks, reset_peak
from tests.tiny_model import write_tiny_gguf

MAX_RESIDENT_BYTES = 64 << 20
MAX_ASKED_BYTES = 1 << 30
"""Address space that threads reserve costs nothing; eight GiB would be seen."""
PATIENCE_S = 10.0
MAX_FIELD = 2**32 - 1
LENGTH_FIELD = slice(36, 40)
"""Of a frame's header."""
STORE_MAGIC = b"\0" + struct.pack("<I", 0x3C85F7CE)
"""What torch's TCPStore is greeted with (torch/csrc/distributed/c10d/TCPStoreBackend.hpp)."""


@pytest_asyncio.fixture
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    async with attacked_server(path, load_model(path, dtype=KVDType.FLOAT32)) as target:
        yield target


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 128:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes((*encoded, number))


async def a_frame(target: Target) -> None:
    """Its field has four bytes."""
    for held in target.held:
        frame = bytearray(encode_frame(held.missing[0]))
        frame[LENGTH_FIELD] = struct.pack("<I", MAX_FIELD)
        _, error = await target.send_frames(held.worker.hello.address, [bytes(frame)])
        assert isinstance(error, Refused)


async def a_grpc_message(target: Target) -> None:
    """Its field has four bytes."""
    for address in (*target.worker_addresses, target.link_address):
        for method in ("kv.v1.PagePath/Write", "kv.v1.PagePair/Open", "v1.Decode/Reserve", "v1.RouterLink/Connect"):
            await _send_and_leave(address, grpc_call(f"/twinpool.{method}".encode(), MAX_FIELD, b"abc"))


async def a_field_of_a_message(target: Target) -> None:
    message = b"\x0a" + varint(EIGHT_GIB) + b"abc"
    for method in ("Decode/Reserve", "Decode/Commit", "Decode/Release", "Prefill/Start", "Prefill/Release", "Worker/GetPages"):
        for address in target.worker_addresses:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await target.call(address, f"/twinpool.v1.{method}", message)
            assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


async def a_ring(target: Target) -> None:
    """A sealed memory file of that size, of which nothing exists."""
    held = target.held[0]
    for num_slots in (EIGHT_GIB // SLOT_BYTES, 4):
        with closing(new_socket()) as connection:
            connection.connect(socket_name(held.worker.hello.address, held.ticket.decode_incarnation))
            file = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(file, EIGHT_GIB)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            send_hello(connection, file, num_slots)
            os.close(file)
            await _refused(connection)


async def a_segment_in_a_ring(target: Target) -> None:
    held = target.held[0]
    with closing(new_socket()) as connection:
        connection.connect(socket_name(held.worker.hello.address, held.ticket.decode_incarnation))
        file = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, SLOT_BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        send_hello(connection, file, 1)
        os.close(file)
        header = bytearray(encode_header(held.missing[0]))
        header[LENGTH_FIELD] = struct.pack("<I", MAX_FIELD)
        await asyncio.get_running_loop().sock_sendall(connection, header)
        await _refused(connection)


async def a_message_to_a_store(target: Target) -> None:
    """The TCPStore of a pair whose sender does not come: a key, and the value of a key."""
    held = target.held[1]
    call = PairCall(held.worker.hello.address)
    hello = PairHello(num_slots=1, is_cuda=False, incarnation_print=print_of(held.ticket.decode_incarnation))
    await call.send(hello.encode())
    address = f"127.0.0.1:{PairWelcome.decode(await call.receive()).port}"
    size = struct.pack("<Q", EIGHT_GIB)
    for kind in (bytes((query,)) for query in range(16)):
        await _send_and_leave(address, STORE_MAGIC + kind + size + b"abc")
        await _send_and_leave(address, STORE_MAGIC + kind + struct.pack("<Q", 3) + b"key" + size + b"abc")
        await _send_and_leave(address, kind + size + b"abc")
    await call.close()


async def a_body(target: Target) -> None:
    address = f"127.0.0.1:{target.http_port}"
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"):
        await _send_and_leave(address, http_request("POST", path, (f"content-length: {EIGHT_GIB}",), b"{"))
        chunk = b"%x\r\n{" % EIGHT_GIB
        await _send_and_leave(address, http_request("POST", path, ("transfer-encoding: chunked",), chunk))


CASES = (a_frame, a_grpc_message, a_field_of_a_message, a_ring, a_segment_in_a_ring, a_message_to_a_store, a_body)


async def test_nothing_is_allocated_by_a_length(target: Target) -> None:
    for case in CASES:
        await _assert_allocates_nothing(case, target)


async def _assert_allocates_nothing(case: Callable[[Target], Awaitable[None]], target: Target) -> None:
    name = getattr(case, "__name__", "")
    reset_peak()
    resident, asked = memory_peaks()
    async with asyncio.timeout(60):
        await case(target)
    peaks = memory_peaks()
    growth = peaks[0] - resident, peaks[1] - asked
    print(f"{name}: {growth[0] / 2**20:.1f} MiB more resident at most, {growth[1] / 2**20:.1f} MiB more asked for")
    assert growth[0] <= MAX_RESIDENT_BYTES, name
    assert growth[1] <= MAX_ASKED_BYTES, name


async def _send_and_leave(address: str, sent: bytes) -> None:
    """And see what comes for a moment, so that it has been read."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                while await reader.read(1 << 16):
                    pass
        hang_up(writer)


async def _refused(connection: socket.socket) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Refused) as refused:
            await _read_to_the_end(connection)
    assert refused.value.code is RefusalCode.MALFORMED


async def _read_to_the_end(connection: socket.socket) -> None:
    while answer := await asyncio.get_running_loop().sock_recv(connection, 4096):
        decode_answer(answer)
