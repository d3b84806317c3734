"""A server whose Ray is broken lets requests end, says why in one sentence and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.server_process import ServerProcess, serving, until, wait_until
from tests.e2e.streams import Stream, http_client, run_stream
from tests.tiny_model import write_tiny_gguf

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
async def test_a_killed_process_of_rays(tmp_path: Path, name: str) -> None:
    server = ServerProcess((), tmp_path / "log")
    try:
        await asyncio.to_thread(server.wait_ready)
        # 1. the process is killed while a stream is running
        stream = Stream()
        async with http_client(server.url) as client:
            task = asyncio.create_task(run_stream(client, stream, "Once", max_tokens=12, ignore_eos=True))
            async with asyncio.timeout(30):
                await stream.began.wait()
            killed = process_of(server, name)
            killed.kill()
            # 2. the stream runs to its end
            async with asyncio.timeout(30):
                await task
        assert stream.is_done
        assert stream.finish_reason == "length"
        # 3. nothing is left but a sentence
        assert await asyncio.to_thread(server.process.wait, 30) == 1
        await until(lambda: not server.survivors(), 10, "every process to be gone")
        assert not server.temp_files()
        words = server.log.read_text()
        assert words.count(f"Ray's {name} (process {killed.pid}) has ended, so that no worker can be started any more") == 1
        assert "died" not in words
        assert "Traceback" not in words
    finally:
        server.kill()


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_process_of_rays_that_is_killed_while_ray_starts(tmp_path: Path, name: str) -> None:
    server = ServerProcess((), tmp_path / "log")
    try:
        wait_until(
            lambda: any(_is_called("raylet", process) for process in server.remember_family()), 30, "the raylet to start"
        )
        killed = process_of(server, name)
        killed.kill()
        assert server.process.wait(40) == 1
        wait_until(lambda: not server.survivors(), 5, "every process to be gone")
        assert not server.temp_files()
        words = server.log.read_text()
        assert words.count(f"Ray's {name} (process {killed.pid}) has ended") == 1
        assert "Traceback" not in words
    finally:
        server.kill()


def test_a_second_signal_does_not_wait_for_a_frozen_ray(tmp_path: Path) -> None:
    with serving(tmp_path / "log", f"{write_tiny_gguf(tmp_path / 'tiny.gguf')}", "--colocated") as server:
        for name in ("raylet", "gcs_server"):
            process_of(server, name).send_signal(signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "once more stops at once" in server.log.read_text(), 5, "the first signal to be taken")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 1
        wait_until(lambda: not server.survivors(), 10, "every process to be gone")
        assert not server.temp_files()


def process_of(server: ServerProcess, name: str) -> psutil.Process:
    (process,) = (process for process in server.remember_family() if _is_called(name, process))
    return process


def _is_called(name: str, process: psutil.Process) -> bool:
    try:
        return process.name() == name
    except psutil.NoSuchProcess:  # Ray starts some for a moment only
        return False
