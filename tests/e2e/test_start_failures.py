"""A server that cannot start ends with one sentence and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.e2e.server_process import TWINPOOL
from tests.tiny_model import write_tiny_gguf

pytestmark = pytest.mark.e2e

TIMEOUT_S = 60.0


def failure_of(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """How ``twinpool serve *args`` ended in this environment and what ``environment`` adds. It has left no temporary file and
    no process that names one."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temp_root:
        failed = subprocess.run(
            [str(TWINPOOL), "serve", "--port", "0", *args],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=os.environ | {"TMPDIR": temp_root} | environment,
            check=False,
        )
        assert not list(Path(temp_root).iterdir())
        for process in psutil.process_iter(["cmdline"]):
            assert temp_root not in " ".join(process.info["cmdline"] or ())
    return failed


def test_a_truncated_file(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:-1000])
    failed = failure_of(str(cut))
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.count("\n") == 1
    assert "cut.gguf" in failed.stderr


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_text("not a model")
    failed = failure_of(str(other))
    assert failed.returncode == 1
    assert "other.gguf" in failed.stderr


def test_what_only_the_workers_find(tmp_path: Path) -> None:
    lacking = write_tiny_gguf(tmp_path / "lacking.gguf", omit=frozenset({"blk.1.ffn_up.weight"}))
    failed = failure_of(str(lacking))
    assert failed.returncode == 1
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("twinpool: ")
    assert "lacks the tensor blk.1.ffn_up.weight" in last
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize("is_in_environment", [False, True])
def test_an_address_where_something_else_than_ray_listens(is_in_environment: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        if is_in_environment:
            failed = failure_of("--address", "auto", RAY_ADDRESS=address)
        else:
            failed = failure_of("--address", address)
    assert failed.returncode == 1
    name = "RAY_ADDRESS" if is_in_environment else "--address"
    assert f"twinpool: no Ray cluster answers at {name} {address}" in failed.stderr
    assert "Traceback" not in failed.stderr
