"""Pages between two CUDA devices over NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds fewer than two CUDA devices"),
]


def test_pages_arrive_and_a_killed_receiver_is_noticed() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/nccl_check"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
