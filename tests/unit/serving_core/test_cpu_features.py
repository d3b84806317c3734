from __future__ import annotations

from pathlib import Path

import pytest

from serving_core.cpu_features import has_avx512_bfloat16, has_bfloat16


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
    assert has_bfloat16(_cpuinfo(tmp_path, line)) is has


def test_the_native_kernels_need_all_of_their_flags(tmp_path: Path) -> None:
    line = "flags\t\t: fpu avx2 avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx512_bf16 xsavec"
    assert has_avx512_bfloat16(_cpuinfo(tmp_path, line))
    assert not has_avx512_bfloat16(_cpuinfo(tmp_path, line.replace(" avx512bw", "")))
    assert not has_avx512_bfloat16(_cpuinfo(tmp_path, line.replace(" avx512_vnni", "")))


def test_nothing_known_is_no(tmp_path: Path) -> None:
    assert not has_bfloat16(tmp_path / "missing")
    assert not has_avx512_bfloat16(tmp_path / "missing")


def _cpuinfo(folder: Path, line: str) -> Path:
    cpuinfo = folder / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    return cpuinfo
