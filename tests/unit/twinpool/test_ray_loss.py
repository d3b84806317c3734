"""What counts as the loss of Ray, on processes and servers of our own."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from twinpool import ray_loss
from twinpool.ray_loss import RayLoss

TIMEOUT_S = 10.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_a_process_that_ends(process: subprocess.Popen[bytes]) -> None:
    loss = RayLoss()
    loss.watch_process("raylet", process.pid)
    waiting = asyncio.create_task(loss.wait())
    assert await is_still_waiting(waiting)
    process.kill()
    async with asyncio.timeout(TIMEOUT_S):
        assert await waiting == f"Ray's raylet (process {process.pid}) has ended"
    loss.end()


async def test_a_process_that_is_gone_before_it_is_watched(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    loss = RayLoss()
    loss.watch_process("raylet", process.pid)
    async with asyncio.timeout(TIMEOUT_S):
        assert await loss.wait() == f"Ray's raylet (process {process.pid}) has ended"


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


async def test_a_child_that_starts_later_and_ends() -> None:
    loss = RayLoss()
    loss.watch_children(("sleep",))
    waiting = asyncio.create_task(loss.wait())
    unnamed = start("true")
    child = start("sleep", "60")
    assert await is_still_waiting(waiting)
    child.kill()
    async with asyncio.timeout(TIMEOUT_S):
        assert await waiting == f"Ray's sleep (process {child.pid}) has ended"
    loss.end()
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    unnamed.wait()
    child.wait()


async def test_a_kernel_that_lets_no_process_be_watched(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    loss = RayLoss()
    loss.watch_process("raylet", process.pid)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning == (
        f"Ray's raylet (process {process.pid}) cannot be watched, and its end will not be noticed: "
        "[Errno 1] Operation not permitted"
    )
    loss.end()


async def test_after_the_end_nothing_is_noticed(process: subprocess.Popen[bytes]) -> None:
    loss = RayLoss()
    loss.watch_process("raylet", process.pid)
    loss.end()
    loss.end()
    process.kill()
    process.wait()
    waiting = asyncio.create_task(loss.wait())
    assert await is_still_waiting(waiting)
    waiting.cancel()


async def test_a_server_that_is_restarted_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_loss, "GONE_AFTER_S", 4.0)
    server, port = await serve()
    loss = RayLoss()
    loss.watch_server("control store", f"127.0.0.1:{port}")
    waiting = asyncio.create_task(loss.wait())
    assert await is_still_waiting(waiting)
    await server.stop(None)
    server, _ = await serve(port)
    assert await is_still_waiting(waiting, 5.0)
    loss.end()
    waiting.cancel()
    await server.stop(None)


async def test_a_server_that_is_gone_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_loss, "GONE_AFTER_S", 2.0)
    server, port = await serve()
    loss = RayLoss()
    loss.watch_server("control store", f"127.0.0.1:{port}")
    waiting = asyncio.create_task(loss.wait())
    assert await is_still_waiting(waiting, 2.5)
    await server.stop(None)
    async with asyncio.timeout(TIMEOUT_S):
        assert await waiting == f"Ray's control store at 127.0.0.1:{port} has been away for 2 s"
    loss.end()


async def serve(port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


async def is_still_waiting(waiting: asyncio.Task[str], for_s: float = 0.3) -> bool:
    done, _ = await asyncio.wait({waiting}, timeout=for_s)
    return not done
