"""What this machine's processor can do, as far as a choice depends on it."""

from __future__ import annotations

from pathlib import Path

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_AVX512_BFLOAT16_FLAGS = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"})
_CPUINFO = Path("/proc/cpuinfo")


def has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the processor multiplies bfloat16 itself. False where that cannot be found out."""
    return not _BFLOAT16_FLAGS.isdisjoint(_flags(cpuinfo))


def has_avx512_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether it does so in registers of 512 bits, with all that the native kernels use beside. False where that cannot be
    found out."""
    return _flags(cpuinfo) >= _AVX512_BFLOAT16_FLAGS


def _flags(cpuinfo: Path) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    # x86 calls the line "flags", ARM "Features"; every core repeats it, the first will do
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
