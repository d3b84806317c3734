"""Settings of one worker's engine, resolved: no "auto" is left in them."""

from __future__ import annotations

from dataclasses import dataclass

from serving_core.kv_page_layout import KVDType


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One worker's engine. ``twinpool`` makes it from the flags of the same names.

    ``dtype`` is the type of weights and KV cache. ``page_size`` is ``--block-size``, in tokens. ``max_model_len`` bounds prompt
    and answer together, or is None for the model's own window. ``max_num_batched_tokens`` bounds the tokens of one prefill
    step, ``max_num_seqs`` the sequences of one step of either phase. ``num_threads`` is for the engine thread's kernels;
    ``cpu_cores`` pins that thread, empty for no pinning; ``niceness`` is added to it (0 to 19).
    """

    dtype: KVDType
    page_size: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int
    num_threads: int
    cpu_cores: tuple[int, ...] = ()
    niceness: int = 0
    lease_s: float = 6.0
