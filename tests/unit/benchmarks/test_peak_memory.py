import os
from pathlib import Path

from benchmarks.engines.peak_memory import peak_memory_bytes


def _write_process(proc: Path, pid: int, peak_kib: int, children: str) -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (task / "children").write_text(children)
    (proc / str(pid) / "status").write_text(f"Name:\tx\nVmPeak:\t  99 kB\nVmHWM:\t   {peak_kib} kB\nVmRSS:\t 1 kB\n")


def test_children_count_and_those_that_have_ended_do_not(tmp_path: Path) -> None:
    _write_process(tmp_path, 1, 10, "2 4 ")
    _write_process(tmp_path, 2, 20, "3 ")
    _write_process(tmp_path, 3, 30, "")
    assert peak_memory_bytes(1, tmp_path) == 60 * 1024


def test_this_process() -> None:
    assert peak_memory_bytes(os.getpid()) > 2**20
