"""What this machine's processor can do, as far as a default depends on it."""

from __future__ import annotations

from pathlib import Path

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bfloat16 itself. False where that cannot be found out."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    # x86 calls the line "flags", ARM "Features"; every core repeats it, the first will do
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _BFLOAT16_FLAGS.isdisjoint(value.split())
    return False
