"""How bytes lie in a page when they are not in one piece: in equal runs at equal distances."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteStride:
    """Runs of ``run_bytes`` bytes, each beginning ``step_bytes`` after the one before.

    Invariant: ``1 <= run_bytes < step_bytes``, so that no two runs touch.
    """

    run_bytes: int
    step_bytes: int

    def __post_init__(self) -> None:
        assert 1 <= self.run_bytes < self.step_bytes

    def num_runs(self, num_bytes: int) -> int:
        """Of ``num_bytes`` bytes, which fill whole runs, at least one."""
        return num_bytes // self.run_bytes

    def extent(self, num_bytes: int) -> int:
        """From the first byte of the first run to behind the last of ``num_bytes``, which fill whole runs, at least one."""
        return (self.num_runs(num_bytes) - 1) * self.step_bytes + self.run_bytes
