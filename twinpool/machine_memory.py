"""How much memory this process and its children may still take, by the machine and by the control groups it is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def available_memory_bytes() -> int:
    """What the machine can still give without swapping, or less where a control group's limit comes first."""
    return min([psutil.virtual_memory().available, *cgroup_headrooms(_CGROUP_ROOT, _OWN_CGROUPS)])


def cgroup_headrooms(root: Path, own_cgroups: Path) -> Iterator[int]:
    """For each control group with a limit that the process is in, the bytes left below it. File cache counts as free.

    ``own_cgroups`` lists the groups as ``/proc/self/cgroup`` does, ``root`` is where they are mounted. Both versions of the
    interface are read; what cannot be read sets no limit.
    """
    for line in _read(own_cgroups).splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers == "":
            yield from _headrooms(root, path, limit="memory.max", used="memory.current", cache="inactive_file")
        elif "memory" in controllers.split(","):
            yield from _headrooms(
                root / "memory",
                path,
                limit="memory.limit_in_bytes",
                used="memory.usage_in_bytes",
                cache="total_inactive_file",
            )


def _headrooms(root: Path, path: str, *, limit: str, used: str, cache: str) -> Iterator[int]:
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        limit_text, used_text = _read(folder / limit).strip(), _read(folder / used).strip()
        if limit_text.isdecimal() and used_text.isdecimal():
            statistics = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
            yield max(0, int(limit_text) - int(used_text) + int(statistics.get(cache, 0)))
        if folder == root:
            return


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
