"""A real ``twinpool serve`` in processes of its own, and what a test may ask of it and do to it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil

from serving_core.page_state import PagesSnapshot, PageState
from serving_core.rpc.cluster_token import ClusterToken
from serving_core.rpc.convert import pages_from_pb
from serving_core.rpc.v1 import worker_pb2, worker_pb2_grpc
from twinpool.death_watch import DeathWatch
from twinpool.server_token import TOKEN_VARIABLE

TWINPOOL = Path(sys.executable).parent / "twinpool"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
MODEL = "smollm2-135m-instruct"
TOKEN = ClusterToken("the-token-of-the-end-to-end-tests")
SMALL_CACHE = ("--kv-cache-memory-bytes", "256MiB")
"""Starts sooner than the default one, and has room for a whole window of the default model."""
REST = frozenset({PageState.FREE, PageState.CACHED})


class ServerProcess:
    """One server, with ``SMALL_CACHE`` where ``args`` say nothing else. ``family`` holds every process that it had when
    ``remember_family`` was last called; ``temp_root`` is where it may put temporary files, and nobody else does."""

    def __init__(self, args: Sequence[str], log: Path) -> None:
        self.log = log
        self.temp_root = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # pytest's own folder has too long a name for Ray
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [str(TWINPOOL), "serve", "--port", "0", *SMALL_CACHE, *args],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {"TMPDIR": str(self.temp_root), TOKEN_VARIABLE: TOKEN.value},
                start_new_session=True,  # so that Ctrl-C in the tests' terminal does not reach it
            )
        self._death_watch = DeathWatch([self.process.pid])  # tests that are killed leave no server behind
        self.url = self._read_url()
        self.family: list[psutil.Process] = []

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until /ready says so."""
        wait_until(lambda: httpx.get(f"{self.url}/ready").status_code == 200, timeout_s, "the server to be ready")

    def workers(self) -> dict[str, dict[str, Any]]:
        """/admin/workers by id."""
        return {worker["id"]: worker for worker in httpx.get(f"{self.url}/admin/workers").json()["workers"]}

    def are_all_ready(self) -> bool:
        """Whether every worker serves, where /ready asks for one of each phase."""
        return all(worker["state"] == "ready" for worker in self.workers().values())

    def is_replaced(self, worker_id: str, old_incarnation: str) -> bool:
        """Whether a new process of that worker serves."""
        worker = self.workers()[worker_id]
        return bool(worker["state"] == "ready" and worker["incarnation"] != old_incarnation)

    def page_states(self) -> dict[str, dict[str, int] | None]:
        """/admin/pages' counts by worker id."""
        answer = httpx.get(f"{self.url}/admin/pages?summary=1", timeout=10).json()
        return {worker["id"]: worker["states"] for worker in answer["workers"]}

    def is_at_rest(self) -> bool:
        """Whether every page of every worker is free or cached."""
        return all(states is not None and _is_at_rest(states) for states in self.page_states().values())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of ``name`` that carry ``labels``."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples if all(text in line for text in wanted))

    def signal_worker(self, worker_id: str, number: signal.Signals) -> None:
        os.kill(self.workers()[worker_id]["pid"], number)

    def remember_family(self) -> list[psutil.Process]:
        """Every process of the server at this moment."""
        this = psutil.Process(self.process.pid)
        self.family = [this, *this.children(recursive=True)]
        return self.family

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it by a signal and return its exit status. Idempotent."""
        if self.process.poll() is None:
            self.remember_family()
            self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Whatever is left of it."""
        if self.process.poll() is None:
            self.remember_family()
        for process in self.survivors():
            process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        self._death_watch.end()
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.temp_root, ignore_errors=True)

    def temp_files(self) -> list[Path]:
        """What lies in ``temp_root`` now."""
        return list(self.temp_root.iterdir())

    def survivors(self) -> list[psutil.Process]:
        """The processes of ``family`` that still run."""
        return [process for process in self.family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def _read_url(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            self.process.stdout.close()
            self._death_watch.end()
            shutil.rmtree(self.temp_root, ignore_errors=True)
            raise AssertionError(f"the server ended with {self.process.wait()}: {self.log.read_text()}")
        return line.removeprefix("listening on ").strip()


@contextmanager
def serving(log: Path, *args: str) -> Iterator[ServerProcess]:
    """A server that is ready, and gone afterwards."""
    server = ServerProcess(args, log)
    try:
        server.wait_ready()
        yield server
        server.stop()
    finally:
        server.kill()


def read_pages(address: str) -> PagesSnapshot:
    """A worker's page pool, asked of the worker itself."""
    with grpc.insecure_channel(address) as channel:
        message = worker_pb2_grpc.WorkerStub(channel).GetPages(
            worker_pb2.GetPagesRequest(is_summary=True), timeout=5, metadata=TOKEN.metadata
        )
    return pages_from_pb(message)


def is_pool_at_rest(pages: PagesSnapshot) -> bool:
    return pages.is_sum_ok and all(count == 0 for state, count in pages.counts.items() if state not in REST)


def _is_at_rest(states: dict[str, int]) -> bool:
    return all(count == 0 for state, count in states.items() if PageState(state) not in REST)


def wait_until(holds: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Ask again and again; returns the seconds it took. Another process tells nobody when it changes."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.05)
    return time.monotonic() - began


async def until(holds: Callable[[], bool], timeout_s: float, what: str) -> float:
    """``wait_until`` beside a running event loop."""
    return await asyncio.to_thread(wait_until, holds, timeout_s, what)
