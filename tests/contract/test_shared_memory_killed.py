"""Whoever is killed outright while a ring is full: the other end knows at once, and nothing of it is left on the machine."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_transfer.page_socket import socket_name
from kv_transfer.shared_memory_page_transport import SharedMemoryPageTransport
from serving_core.errors import WorkerLost
from tests.contract.page_path import (
    PATIENCE_S,
    SharedMemoryPath,
    assert_no_leaks,
    cut_page,
    make_ticket,
    num_rings,
    num_rings_of,
    until,
)
from tests.contract.shared_memory_peer import NUM_SLOTS

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def peer(role: str, address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The other end in a process of its own, once it has got there."""
    command = (sys.executable, "-m", "tests.contract.shared_memory_peer", role, address)
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def leftovers(address: str) -> set[str]:
    """Everything a page path could leave where it outlives a process."""
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    files = {str(path) for place in places for path in place.glob("*twinpool-pages*")}
    name = socket_name(address, make_ticket().decode_incarnation).replace("\0", "@")
    return files | ({name} if name in Path("/proc/net/unix").read_text(encoding="utf-8") else set())


async def test_a_killed_receiver_is_known_at_once_and_leaves_nothing() -> None:
    path = SharedMemoryPath(PATIENCE_S)  # its own service is never started
    ticket = make_ticket(address=path.address)
    # 1. The ring is full, and the next segment waits for a slot.
    async with peer("receiver", path.address) as process, path.transport.open(ticket) as stream:
        for ordinal in range(NUM_SLOTS):
            await stream.write(next(cut_page(ticket, ordinal)))
        waiting = asyncio.ensure_future(stream.write(next(cut_page(ticket, 0))))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert num_rings() > 0
        # 2. Killed.
        process.kill()
        killed_at = time.monotonic()
        with pytest.raises(WorkerLost):
            await waiting
        assert time.monotonic() - killed_at < PATIENCE_S / 4
    # 3. Nothing is left, nor of the sender once it has left the stream.
    assert leftovers(path.address) == set()
    await until(lambda: num_rings() == 0)
    # 4. The name is free for the next one.
    await path.mend_way()
    path.sink.reserve(ticket)
    async with path.transport.open(ticket) as stream:
        await stream.write(next(cut_page(ticket, 0)))
        await stream.flush()
    await path.close()
    await assert_no_leaks()


async def test_a_killed_sender_is_forgotten_and_leaves_nothing() -> None:
    path = SharedMemoryPath(PATIENCE_S)
    await path.mend_way()
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    path.sink.gate.clear()
    # 1. The ring is full, and the sink has its first segments.
    async with peer("sender", path.address) as process:
        await until(lambda: bool(path.sink.batch_sizes))
        assert num_rings() > 0
        # 2. Killed, while the sink still reads: what it has is the receiver's own.
        process.kill()
        await process.wait()
        path.sink.gate.set()
        await until(lambda: num_rings() == 0)
    assert path.sink.num_copies >= 1
    # 3. The next sender is served.
    async with path.transport.open(ticket) as stream:
        for ordinal in range(ticket.num_prompt_pages):
            for segment in cut_page(ticket, ordinal):
                await stream.write(segment)
        await stream.flush()
    path.sink.assert_pages_equal_source(ticket)
    await path.close()
    assert leftovers(path.address) == set()
    await assert_no_leaks()


async def test_both_killed_leave_nothing() -> None:
    path = SharedMemoryPath(PATIENCE_S)
    async with peer("receiver", path.address) as receiver, peer("sender", path.address) as sender:
        assert leftovers(path.address)
        await until(lambda: num_rings_of(receiver.pid) > 0)
        assert num_rings_of(sender.pid) > 0
        receiver.kill()
        sender.kill()
        await asyncio.gather(receiver.wait(), sender.wait())
    assert leftovers(path.address) == set()
    await path.close()
    await assert_no_leaks()


async def test_a_stopped_receiver_costs_a_sender_the_wait_for_its_welcome() -> None:
    path = SharedMemoryPath(PATIENCE_S)
    async with peer("receiver", path.address) as process:
        process.send_signal(19)  # SIGSTOP
        transport = SharedMemoryPageTransport(connect_timeout_s=0.3)
        with pytest.raises(WorkerLost, match="did not answer"):
            async with transport.open(make_ticket(address=path.address)):
                pass
    await path.close()
    await assert_no_leaks()
