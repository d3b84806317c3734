"""What the machine's memory and arithmetic can do with the arms' threads, measured in a process of its own in every round."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional

from benchmarks.engines.workload import Workload

_READ_BYTES = 512 * 2**20  # more than any cache holds
_GEMM_ROWS, _GEMM_IN, _GEMM_OUT = 512, 1536, 3072
_NUM_RUNS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedLimits:
    """Bytes read from memory, and bfloat16 operations in a matrix product of 512 rows, each a second."""

    read_bytes_per_s: float
    gemm_flops_per_s: float

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> SpeedLimits:
        return cls(**json.loads(path.read_text()))


def measure_speed_limits(num_threads: int) -> SpeedLimits:
    """Takes about three seconds."""
    torch.set_num_threads(num_threads)
    values = torch.ones(_READ_BYTES // 4)
    x = torch.randn(_GEMM_ROWS, _GEMM_IN, dtype=torch.bfloat16)
    weight = torch.randn(_GEMM_OUT, _GEMM_IN, dtype=torch.bfloat16)
    with torch.inference_mode():
        read_s = _median_s(values.sum)
        gemm_s = _median_s(lambda: functional.linear(x, weight))
    return SpeedLimits(read_bytes_per_s=_READ_BYTES / read_s, gemm_flops_per_s=2 * _GEMM_ROWS * _GEMM_IN * _GEMM_OUT / gemm_s)


def _median_s(run: Callable[[], object]) -> float:
    run()
    return median(_seconds(run) for _ in range(_NUM_RUNS))


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    measure_speed_limits(Workload.read(Path(sys.argv[1])).num_threads).write(Path(sys.argv[2]))
