"""How many GPUs of this machine workers can compute on. Torch is asked in another process: this one does without."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from serving_core.errors import TwinpoolError

_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_ASK_TORCH = "from llm_engine.device import num_usable_gpus; print(num_usable_gpus())"


def num_local_gpus() -> int:
    """See ``num_usable_gpus``. Takes seconds where the driver shows a GPU, else no time. Raises ``TwinpoolError`` when torch
    cannot be asked."""
    return count_gpus(_DRIVER_FOLDER) if torch_has_cuda(version("torch")) else 0


def torch_has_cuda(torch_version: str) -> bool:
    """Builds for processors alone, AMD and Intel say so in their version."""
    return not torch_version.partition("+")[2].startswith(("cpu", "rocm", "xpu"))


def count_gpus(driver_folder: Path) -> int:
    """``driver_folder`` has an entry for each GPU that NVIDIA's driver knows. What hides them, or is too old, torch knows."""
    if not driver_folder.is_dir() or not any(driver_folder.iterdir()):
        return 0
    asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], stdout=subprocess.PIPE, text=True, check=False)
    if asked.returncode != 0:
        raise TwinpoolError(f"torch cannot say which GPUs it can use: it ended with status {asked.returncode}")
    return int(asked.stdout)
