"""A server that ends leaves no process and no file, whatever it was doing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server_process import MODEL, ServerProcess, serving, until, wait_until
from tests.e2e.streams import Stream, http_client, run_stream
from twinpool.ray_thread import ABANDONED_EXIT_STATUS

pytestmark = pytest.mark.e2e


async def test_sigterm_lets_requests_end_and_leaves_nothing(tmp_path: Path) -> None:
    server = ServerProcess((), tmp_path / "log")
    try:
        server.wait_ready()
        assert server.temp_files()
        async with http_client(server.url) as client:
            # 1. a stream is running when the signal comes
            stream = Stream()
            task = asyncio.create_task(run_stream(client, stream, "Once", max_tokens=100, ignore_eos=True))
            async with asyncio.timeout(30):
                await stream.began.wait()
            server.remember_family()
            server.process.send_signal(signal.SIGTERM)
            # 2. a new request is refused while that one runs on
            await until(lambda: _is_refused(server.url), 5, "new requests to be refused")
            async with asyncio.timeout(30):
                await task
            assert stream.is_done
            assert stream.finish_reason == "length"
        # 3. nothing is left
        assert await asyncio.to_thread(server.process.wait, 30) == 0
        await until(lambda: not server.survivors(), 5, "every process to be gone")
        assert not server.temp_files()
    finally:
        server.kill()


def test_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    server = ServerProcess((), tmp_path / "log")
    try:
        wait_until(lambda: bool(server.temp_files()), 30, "Ray to start")
        assert server.stop(signal.SIGINT) == 0
        wait_until(lambda: not server.survivors(), 10, "every process to be gone")
        assert not server.temp_files()
    finally:
        server.kill()


def test_sigterm_as_soon_as_ray_has_started(tmp_path: Path) -> None:
    server = ServerProcess((), tmp_path / "log")
    try:
        # the death watch is started as soon as Ray itself is
        wait_until(lambda: any(_is_death_watch(process) for process in server.remember_family()), 30, "Ray to have started")
        assert server.stop() == 0
        wait_until(lambda: not server.survivors(), 10, "every process to be gone")
        assert not server.temp_files()
        assert "SIGTERM received" not in server.log.read_text()
    finally:
        server.kill()


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--colocated") as server:
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"model": MODEL, "prompt": "Once", "stream": True, "max_tokens": 5000, "ignore_eos": True},
        ) as stream:
            assert stream.headers["x-twinpool-path"] == "local"
            lines = stream.iter_lines()
            next(lines)
            server.remember_family()
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: _is_refused(server.url), 5, "new requests to be refused")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(15) == ABANDONED_EXIT_STATUS
        wait_until(lambda: not server.survivors(), 5, "every process to be gone")
        assert not server.temp_files()


def test_a_taken_port_and_a_restart_at_once(tmp_path: Path) -> None:
    first = ServerProcess((), tmp_path / "log")
    try:
        port = first.url.rsplit(":", 1)[1]
        with pytest.raises(AssertionError, match=f"--port {port} is taken"):
            ServerProcess(("--port", port), tmp_path / "second")
        httpx.get(f"{first.url}/health")
        first.stop()
        again = ServerProcess(("--port", port), tmp_path / "third")
        assert again.url == first.url
        again.kill()
    finally:
        first.kill()


def _is_refused(url: str) -> bool:
    try:
        answer = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "Hello", "max_tokens": 1}, timeout=30)
    except httpx.HTTPError:
        return True
    return answer.status_code == 503


def _is_death_watch(process: psutil.Process) -> bool:
    try:
        return any(argument.endswith("death_watch.py") for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False
