"""Peak resident memory of a process and its children, from /proc."""

from __future__ import annotations

import re
from pathlib import Path

_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def peak_memory_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Each process at its highest; pages that several of them share count for each. Those that have ended count nothing."""
    try:
        status = (proc / str(pid) / "status").read_text()
        children = [word for task in (proc / str(pid) / "task").iterdir() for word in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    peak = _PEAK.search(status)
    own = int(peak.group(1)) * 1024 if peak is not None else 0
    return own + sum(peak_memory_bytes(int(child), proc) for child in children)
