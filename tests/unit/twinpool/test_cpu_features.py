from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.cpu_features import has_bfloat16


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 xsavec", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("model name\t: avx512_bf16", False),
    ],
)
def test_flags_tell(tmp_path: Path, line: str, has: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    assert has_bfloat16(cpuinfo) is has


def test_nothing_known_is_no(tmp_path: Path) -> None:
    assert not has_bfloat16(tmp_path / "missing")
