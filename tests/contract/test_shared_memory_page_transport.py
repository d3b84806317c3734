"""The shared memory path's sender against receivers that break the contract, and its care for connections."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from kv_transfer.page_answer import encode_accepted
from kv_transfer.page_socket import new_socket, receive_hello, socket_name
from kv_transfer.shared_memory_page_transport import SharedMemoryPageTransport
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.ids import ReservationId
from tests.contract.page_path import PATIENCE_S, SharedMemoryPath, assert_no_leaks, cut_page, make_ticket, until

ADDRESS = f"127.0.0.1:{1 + os.getpid() % 65535}"  # nobody listens there; it makes the name this process's own


@pytest_asyncio.fixture
async def path() -> AsyncIterator[SharedMemoryPath]:
    opened = SharedMemoryPath(PATIENCE_S)
    await opened.mend_way()
    yield opened
    await opened.close()
    await assert_no_leaks()


@asynccontextmanager
async def receiver(serve: Callable[[socket.socket], Awaitable[None]]) -> AsyncIterator[str]:
    """Whoever listens where a decode worker should, for one connection. Yields the address for a ticket."""
    listener = new_socket()
    listener.bind(socket_name(ADDRESS, make_ticket().decode_incarnation))
    listener.listen()

    async def accept() -> None:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        with connection:
            await serve(connection)

    task = asyncio.create_task(accept())
    try:
        yield ADDRESS
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()
    await assert_no_leaks()


async def send_to(address: str, stall_timeout_s: float = PATIENCE_S) -> None:
    transport = SharedMemoryPageTransport(
        max_unanswered_segments=2, stall_timeout_s=stall_timeout_s, connect_timeout_s=stall_timeout_s
    )
    ticket = make_ticket(address=address)
    try:
        async with transport.open(ticket) as stream:
            for segment in cut_page(ticket, 0):
                await stream.write(segment)
            await stream.flush()
    finally:
        await transport.close()


async def welcome(connection: socket.socket) -> None:
    (await receive_hello(connection)).close()
    await asyncio.get_running_loop().sock_sendall(connection, encode_accepted(0))


@pytest.mark.parametrize("answer", [b"?", b"\x02" * 9, encode_accepted(0), encode_accepted(3), encode_accepted(2**64 - 1)])
async def test_an_answer_that_breaks_the_format_or_claims_too_much_is_refused(answer: bytes) -> None:
    async def serve(connection: socket.socket) -> None:
        await welcome(connection)
        await asyncio.get_running_loop().sock_sendall(connection, answer)
        await asyncio.sleep(5)

    async with receiver(serve) as address:
        with pytest.raises(Refused) as refused:
            await send_to(address)
    assert refused.value.code is RefusalCode.MALFORMED


async def test_a_receiver_that_ends_the_connection_is_lost() -> None:
    async with receiver(welcome) as address:
        with pytest.raises(WorkerLost):
            await send_to(address)


@pytest.mark.parametrize("answer", [b"?", b"\x01" * 9])
async def test_a_welcome_that_is_none_makes_it_unreachable(answer: bytes) -> None:
    async def serve(connection: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, answer)
        await asyncio.sleep(5)

    async with receiver(serve) as address:
        with pytest.raises(WorkerLost, match="cannot be reached"):
            await send_to(address)


async def test_a_receiver_that_does_not_answer_is_unreachable_in_bounded_time() -> None:
    async def serve(_connection: socket.socket) -> None:
        await asyncio.sleep(5)

    async with receiver(serve) as address:
        with pytest.raises(WorkerLost, match=r"did not answer within 0\.2 s"):
            await send_to(address, stall_timeout_s=0.2)


async def test_an_attempt_takes_the_connection_of_the_one_before(path: SharedMemoryPath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    num_before = num_sockets()
    for ordinal in range(ticket.num_prompt_pages):
        async with path.transport.open(ticket) as stream:
            for segment in cut_page(ticket, ordinal):
                await stream.write(segment)
            await stream.flush()
        assert num_sockets() == num_before + 2  # the two ends of one connection
    path.sink.assert_pages_equal_source(ticket)


async def test_a_connection_that_broke_while_idle_is_not_taken(path: SharedMemoryPath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    for _ in range(2):
        async with path.transport.open(ticket) as stream:
            await stream.write(next(cut_page(ticket, 0)))
            await stream.flush()
        await path.break_way()
        await path.mend_way()
        await asyncio.sleep(0.05)


async def test_few_connections_stay_idle(path: SharedMemoryPath) -> None:
    transport = SharedMemoryPageTransport(max_idle=1)
    num_before = num_sockets()
    tickets = [make_ticket(address=path.address, reservation_id=ReservationId(f"{number:032x}")) for number in range(3)]
    async with transport.open(tickets[0]), transport.open(tickets[1]), transport.open(tickets[2]):
        assert num_sockets() == num_before + 6
    await until(lambda: num_sockets() == num_before + 2)
    await transport.close()
    with pytest.raises(WorkerLost, match="stopping"):
        async with transport.open(tickets[0]):
            pass


def num_sockets() -> int:
    gc.collect()
    return sum(os.path.exists(f"/proc/self/fd/{fd}") and "socket" in os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files())


def _open_files() -> list[str]:
    return os.listdir("/proc/self/fd")
