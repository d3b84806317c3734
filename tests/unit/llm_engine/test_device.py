"""Where a worker computes, on a machine without CUDA."""

from __future__ import annotations

import logging

import pytest
import torch

from llm_engine.device import CPU, HostCopies, compute_device, num_usable_gpus, runs_on, settle, to_device, to_host

WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


def play_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(WHEEL))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")


def test_cuda_comes_before_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(monkeypatch)
    assert (num_usable_gpus(), compute_device()) == (0, CPU)
    play_gpus(monkeypatch, (9, 0), (8, 9))
    assert (num_usable_gpus(), compute_device()) == (2, torch.device("cuda:0"))


def test_a_gpu_that_torch_is_not_built_for_leaves_all_to_the_processor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    play_gpus(monkeypatch, (9, 0), (6, 1))
    with caplog.at_level(logging.WARNING):
        assert (num_usable_gpus(), compute_device()) == (0, CPU)
    assert caplog.messages[0] == (f"CPUs compute: torch {torch.__version__} has no kernels for GPU 1 (compute capability 6.1)")


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (WHEEL, (7, 5), True),
        (WHEEL, (8, 9), True),
        (WHEEL, (7, 0), False),
        (WHEEL, (11, 0), False),
        (WHEEL, (13, 0), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("compute_80",), (9, 0), True),
        (("compute_90",), (8, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a", "compute_100a"), (10, 3), False),
        (("sm_100f",), (10, 3), True),
        (("compute_100f",), (12, 0), False),
        (("gfx942",), (9, 4), False),
        ((), (9, 0), False),
    ],
)
def test_machine_code_runs_on_its_major_version_and_ptx_on_all_later(
    built: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(built, *capability) is runs


def test_on_the_processor_nothing_is_copied_and_nothing_waited_for() -> None:
    tensor = torch.ones(3)
    assert to_host(tensor) is tensor
    assert to_device(tensor, CPU) is tensor
    settle(CPU)


def test_a_copy_keeps_what_was_there_when_it_began() -> None:
    numbers, others = torch.arange(3), torch.ones(2)
    copies = HostCopies.begin([numbers, others])
    numbers += 5
    assert [copy.tolist() for copy in copies.wait()] == [[0, 1, 2], [1.0, 1.0]]
