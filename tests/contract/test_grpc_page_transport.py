"""The gRPC sender against receivers that break the contract, and its care for channels."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import grpc
import grpc.aio
import psutil
import pytest

from kv_transfer.grpc_page_service import METHOD, SERVICE
from kv_transfer.grpc_page_transport import GrpcPageTransport
from kv_transfer.page_answer import encode_accepted
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.rpc.channel import make_server
from tests.contract.page_path import PATIENCE_S, STALL_TIMEOUT_S, GrpcPath, assert_no_leaks, cut_page, make_ticket, until

Handler = Callable[[object, "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[None]]


@asynccontextmanager
async def receiver(serve: Handler | None) -> AsyncIterator[str]:
    """A server whose page path is ``serve``, or that has none."""
    server = make_server()
    if serve is not None:
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def send_to(address: str, stall_timeout_s: float = PATIENCE_S) -> None:
    transport = GrpcPageTransport(max_unanswered_segments=2, stall_timeout_s=stall_timeout_s)
    ticket = make_ticket(address=address)
    try:
        async with transport.open(ticket) as stream:
            for ordinal in range(ticket.num_prompt_pages):
                for segment in cut_page(ticket, ordinal):
                    await stream.write(segment)
            await stream.flush()
    finally:
        await transport.close()


@pytest.mark.parametrize("answer", [b"", b"?", b"\x02" * 9, encode_accepted(0), encode_accepted(3), encode_accepted(2**64 - 1)])
async def test_an_answer_that_breaks_the_format_or_claims_too_much_is_refused(answer: bytes) -> None:
    async def serve(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.read()
        await context.write(answer)
        await asyncio.sleep(5)

    async with receiver(serve) as address:
        with pytest.raises(Refused) as refused:
            await send_to(address)
    assert refused.value.code is RefusalCode.MALFORMED


async def test_a_receiver_that_ends_the_stream_early_is_lost() -> None:
    async def serve(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.read()

    async with receiver(serve) as address:
        with pytest.raises(WorkerLost):
            await send_to(address)


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_a_receiver_that_fails_the_call_is_lost(code: grpc.StatusCode) -> None:
    async def serve(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.read()
        await context.abort(code, "no more")

    async with receiver(serve) as address:
        with pytest.raises(WorkerLost):
            await send_to(address)


async def test_a_receiver_that_fails_the_call_at_once_is_lost() -> None:
    async def serve(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.abort(grpc.StatusCode.CANCELLED, "no")

    async with receiver(serve) as address:
        with pytest.raises(WorkerLost):
            await send_to(address)


async def test_a_message_too_large_for_the_receiver_is_refused() -> None:
    async def serve(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.read()
        await context.read()  # the sender is out of credits now and waits
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "message larger than max")

    async with receiver(serve) as address:
        with pytest.raises(Refused) as refused:
            await send_to(address)
    assert refused.value.code is RefusalCode.MALFORMED


async def test_a_server_without_a_page_path_knows_no_reservation() -> None:
    async with receiver(None) as address:
        with pytest.raises(Refused) as refused:
            await send_until_refused(address)
    assert refused.value.code is RefusalCode.UNKNOWN_RESERVATION


async def send_until_refused(address: str) -> None:
    """A write that fails before gRPC knows the call's status hides it; the next try, as a hand-off makes it, tells."""
    for _ in range(20):
        with suppress(WorkerLost):
            await send_to(address)


async def test_a_peer_that_accepts_connections_and_says_nothing_costs_a_bounded_wait() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        started_at = time.monotonic()
        with pytest.raises(WorkerLost):
            await send_to(f"127.0.0.1:{listener.getsockname()[1]}", STALL_TIMEOUT_S)
    assert time.monotonic() - started_at < 3 * STALL_TIMEOUT_S


async def test_cancelling_while_it_connects_releases_it_at_once() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sending = asyncio.create_task(send_to(f"127.0.0.1:{listener.getsockname()[1]}"))
        await asyncio.sleep(0.1)
        started_at = time.monotonic()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert time.monotonic() - started_at < PATIENCE_S / 4
    await assert_no_leaks()


async def test_nobody_listening_is_a_lost_worker() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(WorkerLost):
            await send_to(f"127.0.0.1:{unused.getsockname()[1]}")


async def test_a_receiver_that_reads_nothing_costs_a_bounded_wait() -> None:
    async def serve(_requests: object, _context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await asyncio.sleep(5)

    async with receiver(serve) as address:
        started_at = time.monotonic()
        with pytest.raises(WorkerLost):
            await send_to(address, STALL_TIMEOUT_S)
        assert time.monotonic() - started_at < 3 * STALL_TIMEOUT_S


def count_connections(address: str) -> int:
    """Established connections that the server on this port, which is in this process, holds."""
    port = int(address.rpartition(":")[2])
    connections = psutil.Process().net_connections("tcp")
    return sum(1 for end in connections if end.laddr and end.laddr.port == port and end.status == psutil.CONN_ESTABLISHED)


async def send_page(transport: GrpcPageTransport, address: str, incarnation: str) -> None:
    ticket = make_ticket(address=address, incarnation=incarnation)
    async with transport.open(ticket) as stream:
        for segment in cut_page(ticket, 0):
            await stream.write(segment)
        await stream.flush()


async def test_one_channel_per_incarnation(grpc_path: GrpcPath) -> None:
    transport = GrpcPageTransport()
    grpc_path.sink.reserve(make_ticket())
    await asyncio.gather(*(send_page(transport, grpc_path.address, "first") for _ in range(4)))
    await send_page(transport, grpc_path.address, "first")
    assert count_connections(grpc_path.address) == 1
    await send_page(transport, grpc_path.address, "second")
    await until(lambda: count_connections(grpc_path.address) == 1)
    await transport.close()
    await until(lambda: count_connections(grpc_path.address) == 0)


async def test_a_channel_in_use_outlives_its_incarnation_until_its_last_stream(grpc_path: GrpcPath) -> None:
    transport = GrpcPageTransport()
    grpc_path.sink.reserve(make_ticket())
    ticket = make_ticket(address=grpc_path.address, incarnation="first")
    async with transport.open(ticket) as stream:
        await stream.write(next(cut_page(ticket, 0)))
        await send_page(transport, grpc_path.address, "second")
        assert count_connections(grpc_path.address) == 2
        await stream.flush()
    del stream  # a call that is still referenced holds its connection
    await until(lambda: count_connections(grpc_path.address) == 1)
    await transport.close()


async def test_closing_breaks_streams_that_are_open_and_opens_no_more(grpc_path: GrpcPath) -> None:
    transport = GrpcPageTransport()
    grpc_path.sink.reserve(make_ticket())
    grpc_path.sink.gate.clear()
    sending = asyncio.create_task(send_page(transport, grpc_path.address, "first"))
    await until(lambda: bool(grpc_path.sink.batch_sizes))
    await transport.close()
    with pytest.raises(WorkerLost):
        await sending
    with pytest.raises(WorkerLost):
        await send_page(transport, grpc_path.address, "first")
    grpc_path.sink.assert_untouched(make_ticket())
