"""A folder to compile in, which does not outlive its user, however that ends; nor do the processes that work in it.

A small process waits at the end of a pipe, which the kernel closes when the user dies. Run as a script it is that process, and
needs nothing but the standard library.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_NEEDED_BYTES = 8 * 2**20
_MAX_KILLS = 1000  # of one that the kernel does not let go of


class BuildFailed(Exception):
    """A command did not do what it should; the text says why, in one line."""


class BuildFolder:
    """A new folder in ``root``, until the context is left. Raises OSError where there is no place for one."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix="twinpool-build-", dir=root.resolve()))
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(self.path)],
                stdin=subprocess.PIPE,
                start_new_session=True,  # a signal to our group, like Ctrl-C, is not for it
            )
        except OSError:
            self.path.rmdir()
            raise
        try:
            _check_room(self.path)
        except OSError:
            self.remove()
            raise

    def run(self, command: list[str], *, timeout_s: float) -> None:
        """Run ``command`` in the folder, and end whatever it leaves running. Raises BuildFailed, and OSError where it cannot
        even be started."""
        with tempfile.TemporaryFile(dir=self.path) as output:  # a pipe stays open until the last process that has it ends
            process = subprocess.Popen(
                command,
                cwd=self.path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise BuildFailed(f"it took longer than {timeout_s:.0f} s") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if status != 0:
                output.seek(0)
                lines = output.read().decode(errors="replace").splitlines()
                telling = [line.strip() for line in lines if "error" in line] or lines
                raise BuildFailed(f"status {status}{''.join(f', {line[:300]}' for line in telling[:1])}")

    def remove(self) -> None:
        """Idempotent."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def _check_room(folder: Path) -> None:
    """A compiler that runs out of room may say anything."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, _NEEDED_BYTES)


def _remove_after_our_parent(folder: str) -> None:
    sys.stdin.read()
    for _ in range(_MAX_KILLS):
        pids = _pids_in(folder)
        if not pids:
            break
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _pids_in(folder: str) -> list[int]:
    """Of the processes that work there."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # it has ended, or is another user's
                if os.readlink(process / "cwd") == folder:
                    found.append(int(process.name))
    return found


if __name__ == "__main__":
    _remove_after_our_parent(sys.argv[1])
