"""Processes of real arms, small ones: modules written here and run by this interpreter."""

import sys
from pathlib import Path

import pytest

from benchmarks.engines.arm_process import Arm, ArmFailed, run_arm_process


def _arm(folder: Path, source: str) -> Arm:
    """An arm that runs ``source``: its interpreter is a script that leaves ``-m MODULE`` out."""
    python = folder / "python"
    script = folder / "arm.py"
    script.write_text(source)
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    return Arm(name="small", python=str(python), module="small", variables={"COLOUR": "blue"})


def test_what_an_arm_writes(tmp_path: Path) -> None:
    arm = _arm(tmp_path, "import os, sys\nopen(sys.argv[2], 'w').write(open(sys.argv[1]).read() + os.environ['COLOUR'])\n")
    workload = tmp_path / "workload.json"
    workload.write_text("sky ")
    assert run_arm_process(arm, workload, tmp_path, 60).read_text() == "sky blue"


def test_an_arm_that_fails_says_why(tmp_path: Path) -> None:
    arm = _arm(tmp_path, "raise SystemExit('no such colour')\n")
    with pytest.raises(ArmFailed, match=r"^small ended with status 1\. Its last lines: no such colour$"):
        run_arm_process(arm, tmp_path / "workload.json", tmp_path, 60)


def test_figures_of_the_turn_before_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text("old")
    with pytest.raises(ArmFailed, match="ended with status 0"):
        run_arm_process(_arm(tmp_path, ""), tmp_path / "workload.json", tmp_path, 60)


def test_an_arm_that_hangs_is_stopped(tmp_path: Path) -> None:
    arm = _arm(tmp_path, "import threading\nthreading.Event().wait()\n")
    with pytest.raises(ArmFailed, match=r"small was stopped after 0\.5 s"):
        run_arm_process(arm, tmp_path / "workload.json", tmp_path, 0.5)
