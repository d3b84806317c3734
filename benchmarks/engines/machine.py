"""What a result must name: commit and machine."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TELLING_FLAGS = re.compile(r"^(avx2|avx512_?\w+|amx\w+|fma|f16c|bf16|i8mm|sve\w*|asimddp)$")


def commit() -> str:
    """With ``-dirty`` where the tree differs from it."""
    answer = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=_ROOT)
    return answer.stdout.strip() or "unknown"


def processor(num_cores: int, cpuinfo: Path = Path("/proc/cpuinfo"), meminfo: Path = Path("/proc/meminfo")) -> str:
    """Name, cores, memory and those instruction sets on which kernels depend."""
    text = cpuinfo.read_text()
    name = _first(r"^model name\s*:\s*(.*)$", text) or platform.machine()
    flags = _first(r"^(?:flags|Features)\s*:\s*(.*)$", text) or ""
    telling = " ".join(flag for flag in flags.split() if _TELLING_FLAGS.match(flag))
    gib = int(_first(r"^MemTotal:\s*(\d+) kB$", meminfo.read_text()) or 0) / 2**20
    return f"{name}, {num_cores} cores, {gib:.0f} GiB ({telling})"


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1).strip() if found is not None else None
