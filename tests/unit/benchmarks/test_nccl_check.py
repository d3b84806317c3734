"""The check of two GPUs over gloo and on the CPU: the same code, so that it does not rot where they are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.nccl_check import main

ROOT = Path(__file__).parents[3]


def test_it_passes_over_gloo() -> None:
    command = [sys.executable, "scripts/nccl_check", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed receiver: noticed after" in done.stdout


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are two CUDA devices")
def test_without_two_devices_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "needs two" in capsys.readouterr().out
