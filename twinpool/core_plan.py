"""Which cores each engine thread gets. A decode step is short and repeats, so anything else on its core shows in the gaps
between tokens; prefill, router, Ray and clients therefore share the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREFILL_NICENESS = 10
_DECODE_SHARE = 4  # decode workers together get a quarter of the cores: their steps read memory more than they compute


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePlan:
    """Cores by use. ``decode[i]`` is for the engine thread of decode worker i alone, or empty where nothing is pinned;
    ``shared`` is for everything else. ``decode_threads`` and ``prefill_threads`` are kernel threads of each worker."""

    shared: tuple[int, ...]
    decode: tuple[tuple[int, ...], ...]
    decode_threads: int
    prefill_threads: int


def plan_cores(
    cores: Sequence[int],
    *,
    num_prefill_workers: int,
    num_decode_workers: int,
    prefill_threads: int | None,
    decode_threads: int | None,
) -> CorePlan:
    """Divide ``cores``. Thread counts that are None are chosen here.

    A colocated worker counts as a decode worker. Where giving every decode worker cores of its own would leave none for the
    rest, nothing is pinned.
    """
    per_decode = decode_threads or max(1, len(cores) // _DECODE_SHARE // num_decode_workers)
    num_own = per_decode * num_decode_workers
    is_pinned = num_own < len(cores)
    num_shared = len(cores) - num_own if is_pinned else len(cores)
    shared, own = tuple(cores[:num_shared]), tuple(cores[num_shared:])
    return CorePlan(
        shared=shared,
        decode=tuple(own[i * per_decode : (i + 1) * per_decode] for i in range(num_decode_workers)),
        decode_threads=per_decode,
        prefill_threads=prefill_threads or max(1, len(shared) // max(1, num_prefill_workers)),
    )
