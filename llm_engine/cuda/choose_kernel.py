"""Which kernel attends on a CUDA device: the newest that is installed and fits, else none, and torch does."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from llm_engine.cuda.paged_kernel import PagedKernel

_HALF_TYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256

_log = logging.getLogger(__name__)


def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> PagedKernel | None:
    """For heads of ``head_dim`` dimensions in ``dtype``; None for torch. Says in one line of the log which it is, and why no
    other."""
    major, minor = torch.cuda.get_device_capability(device)
    return pick_kernel(
        (
            (obstacle_of_4(dtype, head_dim, major), import_flash_attn_4),
            (obstacle_of_2(dtype, head_dim, major), import_flash_attn_2),
        ),
        device_name=f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})",
    )


def cuda_arithmetic(device: torch.device, form: str, kernel: PagedKernel | None) -> str:
    """The name of an arithmetic, see ``PhaseModel``: matrix products differ between kinds of device and releases of torch."""
    attention = "torch" if kernel is None else kernel.name
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {form}, attention by {attention}"


def pick_kernel(
    candidates: tuple[tuple[str | None, Callable[[], PagedKernel]], ...], *, device_name: str
) -> PagedKernel | None:
    """The first of (what is against it, how it is loaded) with nothing against it that can be imported."""
    obstacles: list[str] = []
    for obstacle, load in candidates:
        kernel = _loaded(load) if obstacle is None else obstacle
        if not isinstance(kernel, str):
            _log.info("%s attends with %s%s", device_name, kernel.name, _because(obstacles))
            return kernel
        obstacles.append(kernel)
    _log.warning("%s attends with torch, which is slower%s", device_name, _because(obstacles))
    return None


def obstacle_of_4(dtype: torch.dtype, head_dim: int, major: int) -> str | None:
    """Why flash-attn-4 cannot attend over pages on compute capability ``major``."""
    if major not in (9, 10, 11):
        return f"flash-attn-4 reads pages on compute capability 9 to 11, and this is {major}"
    if major != 9 and not (head_dim <= 128 or head_dim == _MAX_HEAD_DIM):
        return f"flash-attn-4 takes heads of up to 128 or of 256 dimensions, not {head_dim}, on compute capability {major}"
    return _obstacle("flash-attn-4", dtype, head_dim)


def obstacle_of_2(dtype: torch.dtype, head_dim: int, major: int) -> str | None:
    """Why flash-attn 2 cannot attend on compute capability ``major``."""
    if major < 8:
        return f"flash-attn needs compute capability 8, and this is {major}"
    return _obstacle("flash-attn", dtype, head_dim)


def import_flash_attn_4() -> PagedKernel:
    """Raises ImportError where flash-attn-4 is not installed."""
    from llm_engine.cuda.flash_attn_4 import FlashAttn4

    return FlashAttn4()


def import_flash_attn_2() -> PagedKernel:
    """Raises ImportError where flash-attn is not installed."""
    from llm_engine.cuda.flash_attn_2 import FlashAttn2

    return FlashAttn2()


def _obstacle(name: str, dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in _HALF_TYPES:
        return f"{name} computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"{name} takes heads of a multiple of 8 dimensions up to {_MAX_HEAD_DIM}, not {head_dim}"
    return None


def _loaded(load: Callable[[], PagedKernel]) -> PagedKernel | str:
    """The kernel, or why there is none."""
    try:
        return load()
    except ImportError as error:
        return str(error)


def _because(obstacles: list[str]) -> str:
    return f" ({'; '.join(obstacles)})" if obstacles else ""
