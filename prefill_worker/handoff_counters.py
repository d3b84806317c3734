"""What the hand-offs of one prefill worker moved, and how long it took. Numbers only, changed on the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from serving_core.metric_names import KV_TRANSFER_SECONDS_BUCKETS


@dataclass(slots=True, kw_only=True)
class DurationHistogram:
    """Counts durations by upper bound, in seconds."""

    bounds_s: tuple[float, ...]
    total_s: float = 0.0
    num_observed: int = 0
    _counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._counts = [0] * len(self.bounds_s)

    def observe(self, seconds: float) -> None:
        self.total_s += seconds
        self.num_observed += 1
        for index, bound in enumerate(self.bounds_s):
            if seconds <= bound:
                self._counts[index] += 1
                break

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(upper bound, how many were at most that long), infinity last: the form Prometheus wants."""
        num_so_far = 0
        for bound, count in zip(self.bounds_s, self._counts, strict=True):
            num_so_far += count
            yield bound, num_so_far
        yield float("inf"), self.num_observed


@dataclass(slots=True, kw_only=True)
class HandoffCounters:
    """Totals over hand-offs that have ended, however they ended; the histograms have the acknowledged ones only.

    ``num_bytes_sent`` includes what was sent again. ``transfer_s``: page bytes or the commit were under way; neither computing
    nor the waits after a broken way count. ``exposed_s``: from the last chunk computed to the acknowledged commit.
    """

    num_acknowledged: int = 0
    num_not_acknowledged: int = 0
    num_bytes_sent: int = 0
    transfer_s: DurationHistogram = field(default_factory=lambda: DurationHistogram(bounds_s=KV_TRANSFER_SECONDS_BUCKETS))
    exposed_s: DurationHistogram = field(default_factory=lambda: DurationHistogram(bounds_s=KV_TRANSFER_SECONDS_BUCKETS))
