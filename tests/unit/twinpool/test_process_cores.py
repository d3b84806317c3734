from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from twinpool.process_cores import on_cores

CORES = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores to tell one from the other")


@needs_two_cores
def test_on_cores_is_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    with on_cores([CORES[1]]):
        assert os.sched_getaffinity(0) == {CORES[1]}
    assert os.sched_getaffinity(0) == before
    with on_cores([]):
        assert os.sched_getaffinity(0) == before


@needs_two_cores
def test_a_tree_is_confined_with_all_its_threads() -> None:
    # in a process of its own, so that the tests' own cores stay as they are
    program = """
import os, subprocess, sys, threading
from twinpool.process_cores import confine_process_tree
core = int(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
confine_process_tree([core])
confined = [os.sched_getaffinity(pid) for pid in (0, child.pid, thread.native_id)]
stop.set()
child.communicate(b"\\n")
sys.exit(confined != [{core}] * 3)
"""
    assert subprocess.run([sys.executable, "-c", program, str(CORES[1])], check=False, timeout=60).returncode == 0


def test_a_thread_inherits_the_cores_of_the_one_that_starts_it() -> None:
    seen: list[set[int]] = []
    with on_cores(CORES[:1]):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [set(CORES[:1])]
