"""What is used as the native kernels was built for them, and a build that is cut short leaves nothing behind."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from llm_engine.native import compiler, kernels
from llm_engine.native.kernels import why_no_kernels

pytestmark = pytest.mark.usefixtures("library")  # else there is nothing to test
_ASK = "from llm_engine.native.kernels import why_no_kernels; print(why_no_kernels())"
# The library that these make knows its key and nothing else, which takes seconds less. The last word names a log.
_QUICK = """
log=$1; shift; echo "$*" >> $log
case "$*" in
  *build_key.cpp) exec c++ "$@";;
  *.cpp) exit 0;;
  *) exec c++ -shared -o "$4" build_key.o;;
esac
"""
_FOREIGN = """
case "$*" in
  *.cpp) exit 0;;
  *) echo 'int other;' | exec c++ -shared -o "$4" -x c++ -;;
esac
"""
_HANGING = 'sleep 1000 & echo $$ $! > "$1"; wait'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    return tmp_path / "cache/twinpool"


@pytest.fixture
def use_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(script: str, *words: str) -> None:
        (tmp_path / "compiler").write_text(script)
        monkeypatch.setenv("CXX", " ".join(["sh", str(tmp_path / "compiler"), *words]))

    return use


def ask() -> str:
    """In a process of its own, since half a library would end this one."""
    return subprocess.run([sys.executable, "-c", _ASK], check=True, capture_output=True, text=True).stdout.strip()


def test_a_damaged_library_is_built_again(cache: Path, tmp_path: Path, use_compiler: Callable[..., None]) -> None:
    # 1. It is built once.
    use_compiler(_QUICK, str(tmp_path / "log"))
    assert [ask(), ask()] == ["None", "None"]
    (library,) = cache.iterdir()
    whole, log = library.read_bytes(), (tmp_path / "log").read_text()

    # 2. Each time that something else is found under its name, again.
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    foreign = kernels._openmp_runtime().read_bytes()
    for num_builds, damage in enumerate((whole[:6000], b"", bytes(changed), whole[:-1], whole[:-32], foreign), start=2):
        library.write_bytes(damage)
        assert [ask(), ask()] == ["None", "None"]
        assert (tmp_path / "log").read_text() == log * num_builds
        assert kernels._is_whole(library)
        assert list(cache.iterdir()) == [library]


def test_a_library_of_another_key_is_not_taken(cache: Path, tmp_path: Path, use_compiler: Callable[..., None]) -> None:
    use_compiler(_QUICK, str(tmp_path / "log"))
    assert ask() == "None"
    (other,) = cache.iterdir()
    use_compiler(_QUICK, str(tmp_path / "log2"))
    assert ask() == "None"
    (library,) = set(cache.iterdir()) - {other}
    library.write_bytes(other.read_bytes())
    assert ask() == "None"
    assert library.read_bytes() != other.read_bytes()


def test_a_compiler_that_makes_another_library_is_not_believed(cache: Path, use_compiler: Callable[..., None]) -> None:
    use_compiler(_FOREIGN)
    why_not = why_no_kernels()
    assert why_not is not None
    assert why_not.endswith("it made a library without the kernels)")
    assert not list(cache.iterdir())


def test_a_command_that_cannot_be_read_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "')
    assert why_no_kernels() == "cannot be built (CXX is 'g++ \"': No closing quotation)"


def test_an_empty_command_counts_as_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", " ")
    monkeypatch.setenv("PATH", str(cache))
    assert why_no_kernels() == "cannot be built (there is no C++ compiler, c++ or g++ or clang++)"


def test_a_full_folder_costs_only_time(
    cache: Path, tmp_path: Path, use_compiler: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def allocate_in_temp(file: int, offset: int, length: int) -> None:
        if str(cache) in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate_in_temp)
    use_compiler(_QUICK, str(tmp_path / "log"))
    assert why_no_kernels() is None
    assert not list((tmp_path / "temp").iterdir())


def test_a_compiler_that_hangs_is_ended_with_its_children(
    cache: Path, tmp_path: Path, use_compiler: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_TIMEOUT_S", 0.5)
    use_compiler(_HANGING, str(tmp_path / "pids"))
    why_not = why_no_kernels()
    assert why_not is not None
    assert "it took longer than" in why_not
    for pid in (tmp_path / "pids").read_text().split():
        wait_end(int(pid))
    assert not list(cache.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_is_killed_while_it_builds_leaves_nothing(
    number: signal.Signals, cache: Path, tmp_path: Path, use_compiler: Callable[..., None]
) -> None:
    # 1. The compiler hangs.
    os.mkfifo(tmp_path / "pids")
    use_compiler(_HANGING, str(tmp_path / "pids"))
    ask = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {_ASK}"  # shells ignore it in background
    with subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        pids = (tmp_path / "pids").read_text().split()
        assert list(cache.iterdir())

        # 2. The one that waits for it is killed.
        process.send_signal(number)
        process.communicate()  # until the last process that has its output ends
        assert process.returncode == -number

    # 3. Nothing is left.
    for pid in pids:
        wait_end(int(pid))
    assert not list(cache.iterdir())


def wait_end(pid: int) -> None:
    """Of a process that has ended, though perhaps nobody has asked for its status yet, or is about to."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        ended, _, _ = select.select([process], [], [], 10)
        os.close(process)
        assert ended
