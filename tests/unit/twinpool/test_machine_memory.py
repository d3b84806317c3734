from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from twinpool.machine_memory import available_memory_bytes, cgroup_headrooms


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def headrooms(root: Path, own: str) -> list[int]:
    path = root.parent / "own"
    path.write_text(own)
    return list(cgroup_headrooms(root, path))


def test_the_limits_of_every_group_above_count(root: Path) -> None:
    statistics = "anon 5\ninactive_file 30\nactive_file 7\n"
    write_group(root / "a" / "b", memory__max="max\n", memory__current="50\n", memory__stat=statistics)
    write_group(root / "a", memory__max="1000\n", memory__current="600\n", memory__stat=statistics)
    assert headrooms(root, "0::/a/b\n") == [1000 - 600 + 30]


def test_a_container_sees_its_own_group_as_the_root(root: Path) -> None:
    write_group(root, memory__max="1000\n", memory__current="1200\n")
    assert headrooms(root, "0::/\n") == [0]


def test_the_first_version_is_read_too(root: Path) -> None:
    write_group(
        root / "memory" / "x",
        memory__limit_in_bytes="1000\n",
        memory__usage_in_bytes="700\n",
        memory__stat="total_inactive_file 100\n",
    )
    assert headrooms(root, "11:cpu,cpuacct:/x\n7:memory:/x\n") == [400]


def test_what_cannot_be_read_sets_no_limit(root: Path) -> None:
    assert headrooms(root, "0::/gone\nnonsense\n") == []
    assert list(cgroup_headrooms(root, root / "missing")) == []


def test_this_machine_has_some() -> None:
    assert 0 < available_memory_bytes() <= psutil.virtual_memory().total
