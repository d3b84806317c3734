"""A median with the lowest and highest of its values, as every figure of a result is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Over the rounds of a run."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of those values that were measured; None when none was."""
        known = [value for value in values if value is not None]
        return cls(median=median(known), low=min(known), high=max(known)) if known else None

    def text(self, digits: int = 0) -> str:
        """Like ``12.5 (12.1-13.0)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"
