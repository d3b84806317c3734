"""Whoever of a pair is killed outright or stopped while segments are under way: the other end knows within its deadlines, keeps
nothing of it, and the next hand-off has a pair of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_transfer.fallback_transport import FallbackTransport
from kv_transfer.grpc_page_service import GrpcPageService
from kv_transfer.grpc_page_transport import GrpcPageTransport
from kv_transfer.hold_off import HoldOff
from kv_transfer.page_transport import PageStream, PageTransport
from kv_transfer.torch_distributed_page_service import TorchDistributedPageService
from kv_transfer.torch_distributed_page_transport import TorchDistributedPageTransport
from serving_core.clock import ManualClock, MonotonicClock
from serving_core.errors import WorkerLost
from serving_core.rpc.channel import make_server
from serving_core.transfer_ticket import TransferTicket
from tests.contract.page_path import (
    PATIENCE_S,
    RecordingSink,
    TorchDistributedPath,
    assert_no_leaks,
    cut_page,
    make_ticket,
    num_pair_threads,
    until,
)
from tests.contract.pair_peer import NUM_SLOTS

ROOT = Path(__file__).parents[2]
KEEPALIVE_S = 4.0
"""What gRPC takes to notice a stopped process, with room for a busy machine."""


@asynccontextmanager
async def peer(role: str, address: str = "") -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The other end in a process of its own, once it has got there, and what it says."""
    command = (sys.executable, "-m", "tests.contract.pair_peer", role, address)
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(90):
            line = await process.stdout.readline()
        assert line
        yield process, line.decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def make_transport(*, stall_timeout_s: float = PATIENCE_S) -> TorchDistributedPageTransport:
    return TorchDistributedPageTransport(
        "127.0.0.1",
        hold_off=HoldOff(MonotonicClock(), first_s=0.0),
        max_unanswered_segments=NUM_SLOTS,
        stall_timeout_s=stall_timeout_s,
    )


async def fill_credits(stream: PageStream, ticket: TransferTicket) -> asyncio.Future[None]:
    """All credits used up; returns the write that waits for the next."""
    for ordinal in range(NUM_SLOTS):
        await stream.write(next(cut_page(ticket, ordinal)))
    waiting = asyncio.ensure_future(stream.write(next(cut_page(ticket, 0))))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    return waiting


@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGKILL, PATIENCE_S / 4), (signal.SIGSTOP, KEEPALIVE_S)])
async def test_a_receiver_that_is_killed_or_stopped_is_lost_within_the_deadlines(
    number: signal.Signals, limit_s: float
) -> None:
    transport = make_transport(stall_timeout_s=KEEPALIVE_S)
    async with peer("receiver") as (process, address):
        ticket = make_ticket(address=address)
        async with transport.open(ticket) as stream:
            waiting = await fill_credits(stream, ticket)
            process.send_signal(number)
            struck_at = time.monotonic()
            with pytest.raises(WorkerLost):
                await waiting
            assert time.monotonic() - struck_at < limit_s
        # Nobody is there for the next one, which is known in bounded time, too.
        with pytest.raises(WorkerLost, match=r"cannot be reached over torch\.distributed"):
            async with transport.open(ticket):
                pass
        # What waits for a stopped peer ends with its deadline.
        await transport.close()
        await until(lambda: num_pair_threads() == 0)
    await assert_no_leaks()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_that_is_killed_or_stopped_is_forgotten(number: signal.Signals) -> None:
    path = TorchDistributedPath(PATIENCE_S)
    path.service = TorchDistributedPageService(path.sink, stall_timeout_s=KEEPALIVE_S)
    await path.mend_way()
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    path.sink.gate.clear()
    # 1. Its credits are used up, and the sink has its first segments.
    async with peer("sender", path.address) as (process, _):
        await until(lambda: bool(path.sink.batch_sizes))
        assert path.service.num_pairs == 1
        # 2. Struck, while the sink still reads: what it has is the receiver's own.
        process.send_signal(number)
        path.sink.gate.set()
        async with asyncio.timeout(2 * KEEPALIVE_S):
            while path.service.num_pairs:  # noqa: ASYNC110 - a test looks on from outside
                await asyncio.sleep(0.01)
        # 3. The next sender has a pair of its own, while the old one may still be there, stopped.
        async with path.transport.open(ticket) as stream:
            for ordinal in range(ticket.num_prompt_pages):
                for segment in cut_page(ticket, ordinal):
                    await stream.write(segment)
            await stream.flush()
        path.sink.assert_pages_equal_source(ticket)
    await path.close()
    await assert_no_leaks()


async def test_after_a_failure_grpc_takes_over_and_is_counted_until_the_hold_off_is_over() -> None:
    """One worker serves both; its pairs break, its gRPC does not."""
    sink, clock = RecordingSink(), ManualClock()
    server = make_server()
    pairs = TorchDistributedPageService(sink)
    pairs.add_to_server(server)
    GrpcPageService(sink).add_to_server(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    ticket = make_ticket(address=address)
    pairs.start(address, ticket.decode_incarnation)
    await server.start()
    over_pairs = TorchDistributedPageTransport("127.0.0.1", hold_off=HoldOff(clock), stall_timeout_s=0.5)
    transport = FallbackTransport([over_pairs, GrpcPageTransport()])
    sink.reserve(ticket)
    # 1. The first choice.
    await _send(transport, ticket, 0)
    assert dict(transport.num_streams) == {"torch_distributed": 1}
    # 2. The sink stalls, and with it the pair.
    sink.gate.clear()
    with pytest.raises(WorkerLost):
        await _send(transport, ticket, 1)
    sink.gate.set()
    # 3. The same hand-off goes on over gRPC, as often as it likes.
    await _send(transport, ticket, 1)
    await _send(transport, ticket, 2)
    assert dict(transport.num_streams) == {"torch_distributed": 2, "grpc": 2}
    # 4. After a while a new pair is made.
    clock.advance(1.1)
    await _send(transport, ticket, 3)
    assert dict(transport.num_streams) == {"torch_distributed": 3, "grpc": 2}
    sink.assert_pages_equal_source(ticket)
    await transport.close()
    await server.stop(None)
    await pairs.close()
    await assert_no_leaks()


async def _send(transport: PageTransport, ticket: TransferTicket, ordinal: int) -> None:
    async with transport.open(ticket) as stream:
        for segment in cut_page(ticket, ordinal):
            await stream.write(segment)
        await stream.flush()
