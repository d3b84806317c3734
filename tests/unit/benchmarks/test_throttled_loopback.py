"""The slow link itself, in processes of their own, since a thread that has entered the namespace does not come back."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import throttled_loopback

NUM_BYTES = 2 << 20
BYTES_PER_S = 20e6


def send(listener: socket.socket) -> float:
    """Seconds until the other end has read ``NUM_BYTES`` from a new connection."""

    def read() -> None:
        connection, _ = listener.accept()
        with connection:
            num_left = NUM_BYTES
            while num_left > 0:
                num_left -= len(connection.recv(1 << 16))
            connection.sendall(b".")

    reader = threading.Thread(target=read)
    reader.start()
    with socket.create_connection(listener.getsockname()) as connection:
        started_at = time.perf_counter()
        connection.sendall(bytes(NUM_BYTES))
        connection.recv(1)
        seconds = time.perf_counter() - started_at
    reader.join()
    return seconds


def measure() -> None:
    """In the namespace: the slow port, another one, the slow port once it is slow no more."""
    throttled_loopback.enter()
    with socket.create_server(("127.0.0.1", 0)) as slow, socket.create_server(("127.0.0.1", 0)) as fast:
        throttled_loopback.limit(slow.getsockname()[1], 1.0)
        throttled_loopback.limit(slow.getsockname()[1], BYTES_PER_S)
        print(send(slow), send(fast), end=" ")
        throttled_loopback.limit(slow.getsockname()[1], None)
        print(send(slow))


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and tc")
def test_one_port_is_held_to_its_rate_and_no_other() -> None:
    command = [sys.executable, "-m", "tests.unit.benchmarks.test_throttled_loopback"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=Path(__file__).parents[3])
    if "takes a network namespace" in answer.stderr or "is unknown" in answer.stderr:
        pytest.skip(answer.stderr)  # a container that may not, or a kernel without these queues
    slow_s, fast_s, free_s = map(float, answer.stdout.split())
    least_s = NUM_BYTES / BYTES_PER_S * 0.9  # the bucket is full at first
    assert slow_s > least_s
    assert max(fast_s, free_s) < least_s


if __name__ == "__main__":
    measure()
