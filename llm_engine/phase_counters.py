"""What one phase has done since its process started. Numbers only; naming them for Prometheus is the worker's business."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from serving_core.errors import RefusalCode, Refused


@dataclass(slots=True, kw_only=True)
class PhaseCounters:
    """Totals that never go down.

    ``num_prompt_tokens``: computed here. ``num_prefix_queries``: prompt tokens that were looked for in the prefix cache, of
    which ``num_prefix_hits`` were there. ``num_generation_tokens``: sampled here (index 0 by prefill, the rest by decode).
    ``num_kv_bytes``: copied into pages for a hand-off (decode only; what prefill sends, its hand-offs count).
    ``num_preemptions``: sequences evicted so that an older one could grow (decode only).
    ``refusals``: what was asked of the phase and declined, page writes included.
    """

    num_prompt_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_generation_tokens: int = 0
    num_kv_bytes: int = 0
    num_leases_expired: int = 0
    num_preemptions: int = 0
    refusals: Counter[RefusalCode] = field(default_factory=Counter)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a ``Refused`` that leaves the block, by its code."""
        try:
            yield
        except Refused as refused:
            self.refusals[refused.code] += 1
            raise
