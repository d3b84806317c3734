"""What the tests of this folder need."""

from __future__ import annotations

import pytest
import torch

from llm_engine.cuda.choose_kernel import import_flash_attn_2, import_flash_attn_4, obstacle_of_2, obstacle_of_4
from llm_engine.cuda.paged_kernel import PagedKernel

DEVICE = torch.device("cuda", 0)
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
KERNELS = ("flash-attn", "flash-attn-4")


def kernel_or_skip(name: str, *, head_dim: int) -> PagedKernel:
    """One of ``KERNELS``, for bfloat16. Skips the test, with the reason, where it cannot be had."""
    major, _ = torch.cuda.get_device_capability(DEVICE)
    obstacle_of, load = {
        "flash-attn": (obstacle_of_2, import_flash_attn_2),
        "flash-attn-4": (obstacle_of_4, import_flash_attn_4),
    }[name]
    obstacle = obstacle_of(torch.bfloat16, head_dim, major)
    if obstacle is not None:
        pytest.skip(obstacle)
    try:
        return load()
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")
