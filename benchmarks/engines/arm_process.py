"""Runs an arm in a process of its own, on the cores that all arms get, and collects what it left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_NUM_SHOWN_LINES = 5


class ArmFailed(Exception):
    """The process ended badly or took too long; the sentence ends with its last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """``module`` is run by the interpreter ``python``, with ``variables`` in its environment."""

    name: str
    python: str
    module: str
    variables: Mapping[str, str] = field(default_factory=dict)


def run_arm_process(arm: Arm, workload_path: Path, folder: Path, timeout_s: float) -> Path:
    """The file that the arm wrote into ``folder``. No process of it is left. Raises ArmFailed.

    It inherits this process's cores. What it prints goes into a log beside the file.
    """
    figures_path, log_path = folder / "figures.json", folder / "log.txt"
    figures_path.unlink(missing_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [arm.python, "-m", arm.module, str(workload_path), str(figures_path)],
            cwd=_ROOT,
            env=_environment(arm),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ArmFailed(f"{arm.name} was stopped after {timeout_s:g} s. {_last_lines(log_path)}") from error
        finally:
            _end_session(process)
    if status != 0 or not figures_path.exists():
        raise ArmFailed(f"{arm.name} ended with status {status}. {_last_lines(log_path)}")
    return figures_path


def _environment(arm: Arm) -> dict[str, str]:
    """Without PYTHONPATH, which is meant for this interpreter and not for that of a peer."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    num_threads = str(len(os.sched_getaffinity(0)))
    return inherited | {"OMP_NUM_THREADS": num_threads, "HF_HUB_OFFLINE": "1"} | dict(arm.variables)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return "Its last lines: " + " / ".join(line.strip() for line in lines[-_NUM_SHOWN_LINES:])
