"""The library is built once, by any number of processes at once, and its absence is told in one line."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llm_engine.native import kernels
from llm_engine.native.compiler import compilers
from llm_engine.native.kernels import why_no_kernels
from llm_engine.native.library import NativeLibrary, find_library

pytestmark = pytest.mark.usefixtures("library")  # else there is nothing to test
_LOAD = "from llm_engine.native.library import load_library; assert load_library() is not None"


@pytest.fixture(autouse=True)
def quick_compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own without its optimiser, which takes three quarters of the time: what is built here never computes."""
    script = tmp_path_factory.mktemp("compiler") / "c++"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(compilers()[0])} "$@" -O0\n')
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "twinpool"


def find_anew() -> NativeLibrary | str:
    return find_library.__wrapped__()


def test_it_is_built_once(cache: Path) -> None:
    # 1. Two processes at once leave one library.
    processes = [subprocess.Popen([sys.executable, "-c", _LOAD]) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    (built,) = cache.iterdir()
    assert built.suffix == ".so"

    # 2. The next one uses it.
    before = built.stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", _LOAD], check=True)
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before]


@pytest.mark.parametrize(
    ("compiler", "reason"), [("/bin/false", "status 1"), ("/missing/c++", "No such file"), ("sh -c 'echo 1; exit 0' --", "")]
)
def test_a_compiler_that_builds_nothing_leaves_torch(
    compiler: str, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.INFO):
        assert isinstance(find_anew(), str)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "Torch computes" in record.message
    assert reason in record.message
    assert "\n" not in record.message
    assert not list(cache.glob("*.so"))


def test_a_process_without_torch_finds_out_and_builds_for_the_others(cache: Path) -> None:
    code = "import sys; from llm_engine.native.kernels import why_no_kernels as why; print(why(), 'torch' in sys.modules)"

    def run() -> str:
        return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    # 1. It builds what a process with torch uses.
    assert run() == "None False\n"
    (built,) = cache.iterdir()
    before = built.stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", _LOAD], check=True)
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before]


def test_a_process_without_torch_finds_out_that_nothing_can_be_built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert why_no_kernels() == "cannot be built (/bin/false: status 1)"
    assert not list(cache.glob("*.so"))


def test_no_compiler_leaves_torch(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    assert isinstance(find_anew(), str)
    assert "no C++ compiler" in caplog.text


def test_another_processor_leaves_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kernels, "has_avx512_bfloat16", lambda: False)
    assert find_anew() == "need a processor with AVX-512 BF16"
    assert "Torch computes: the native kernels need a processor with AVX-512 BF16." in caplog.text


def test_a_folder_that_cannot_be_used_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert isinstance(find_anew(), NativeLibrary)
