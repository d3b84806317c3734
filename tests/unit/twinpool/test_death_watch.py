"""What outlives a killed process and what does not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from twinpool.death_watch import DeathWatch

_WATCH_AND_BE_KILLED = """
import os, signal, sys
from twinpool.death_watch import DeathWatch
DeathWatch([int(sys.argv[1])])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_the_watched_end_with_a_killed_watcher(sleeper: subprocess.Popen[bytes]) -> None:
    subprocess.run([sys.executable, "-c", _WATCH_AND_BE_KILLED, str(sleeper.pid)], check=False)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_the_watched_live_on_when_the_watch_ends(sleeper: subprocess.Popen[bytes]) -> None:
    watch = DeathWatch([sleeper.pid])
    watch.end()
    watch.end()
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.5)


def test_a_process_that_is_gone_is_not_watched() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    DeathWatch([gone.pid]).end()
