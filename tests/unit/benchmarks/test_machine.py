from pathlib import Path

from benchmarks.engines.machine import processor


def test_processor(tmp_path: Path) -> None:
    cpuinfo, meminfo = tmp_path / "cpuinfo", tmp_path / "meminfo"
    cpuinfo.write_text("model name\t: Some Chip 9\nflags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_tile rdpid\n")
    meminfo.write_text("MemTotal:       25165824 kB\n")
    assert processor(4, cpuinfo, meminfo) == "Some Chip 9, 4 cores, 24 GiB (avx2 avx512f avx512_bf16 amx_tile)"
