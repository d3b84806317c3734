"""GPUs counted by torch in another process, where a driver shows some."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving_core.errors import TwinpoolError
from twinpool import local_gpus
from twinpool.local_gpus import count_gpus, num_local_gpus, torch_has_cuda


@pytest.fixture
def driver_folder(tmp_path: Path) -> Path:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_torch_says_how_many_of_them_it_can_use(driver_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usable = "import torch; torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 2; "
    usable += "torch.cuda.get_arch_list = lambda: ['sm_80']; torch.cuda.get_device_capability = lambda index: (8, 6); "
    monkeypatch.setattr(local_gpus, "_ASK_TORCH", usable + local_gpus._ASK_TORCH)
    assert count_gpus(driver_folder) == 2


def test_what_the_driver_shows_and_torch_cannot_use_does_not_count(
    driver_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert count_gpus(driver_folder) == 0


def test_a_torch_that_cannot_answer_is_reported(driver_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gpus, "_ASK_TORCH", "raise SystemExit(3)")
    with pytest.raises(TwinpoolError, match="torch cannot say which GPUs it can use: it ended with status 3"):
        count_gpus(driver_folder)


def test_nobody_is_asked_without_a_driver_or_a_build_for_it(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_gpus, "_ASK_TORCH", "raise SystemExit(3)")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert count_gpus(empty) == count_gpus(tmp_path / "missing") == 0
    monkeypatch.setattr(local_gpus, "_DRIVER_FOLDER", driver_folder)
    monkeypatch.setattr(local_gpus, "version", lambda package: "2.11.0+cpu")
    assert num_local_gpus() == 0


@pytest.mark.parametrize(
    ("version", "has_cuda"),
    [("2.11.0", True), ("2.11.0+cu130", True), ("2.11.0+cpu", False), ("2.11.0+rocm7.1", False), ("2.11.0+xpu", False)],
)
def test_builds_without_cuda_say_so(version: str, has_cuda: bool) -> None:
    assert torch_has_cuda(version) is has_cuda
