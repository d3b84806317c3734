"""Settings of one worker's engine, resolved but for what its own processor and file decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName


class Quantization(StrEnum):
    """In what form a phase computes with the weights. AUTO is the form that each is stored in, NONE the engine's ``dtype``."""

    AUTO = "auto"
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


DEFAULT_QUANTIZATIONS: Mapping[PhaseName, Quantization] = {
    PhaseName.PREFILL: Quantization.NONE,  # bound by arithmetic
    PhaseName.DECODE: Quantization.AUTO,  # bound by the bytes of the weights
}


DEFAULT_PAGE_SIZE = 16
"""On CPUs, and wherever torch attends."""

MIN_MODEL_LEN, MAX_MODEL_LEN = 2, 2**20
"""A token of a prompt and one of its answer, and the longest window that can be asked for."""

MAX_KV_CACHE_BYTES = 2**44


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One worker's engine. ``twinpool`` makes it from the flags of the same names.

    ``dtype`` is the type of activations and of those weights that are not quantised; ``kv_cache_dtype`` that of the KV cache,
    or None for the same. The two quantizations are those of the phases that the worker has. ``page_size`` is
    ``--block-size``, in tokens, or None for what suits the worker's attention. ``max_model_len`` bounds prompt and answer
    together, or is None for the model's own window. ``max_num_batched_tokens`` bounds the tokens of one prefill step,
    ``max_num_seqs`` the sequences of one step of either phase. ``eager_phases`` are computed by torch's own operators, one by
    one. ``has_prefix_cache``: pages are kept for prompts that begin as one before them. ``has_async_scheduling``: decode steps
    on GPUs begin before the one before is over. ``num_threads`` is for the engine
    thread's kernels; ``cpu_cores`` pins that thread, empty for no pinning; ``niceness`` is added to it (0 to 19).
    """

    dtype: KVDType
    page_size: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int
    num_threads: int
    prefill_quantization: Quantization = DEFAULT_QUANTIZATIONS[PhaseName.PREFILL]
    decode_quantization: Quantization = DEFAULT_QUANTIZATIONS[PhaseName.DECODE]
    kv_cache_dtype: KVDType | None = None
    eager_phases: frozenset[PhaseName] = frozenset()
    has_prefix_cache: bool = True
    has_async_scheduling: bool = True
    cpu_cores: tuple[int, ...] = ()
    niceness: int = 0
    lease_s: float = 6.0

    @property
    def planned_page_size(self) -> int:
        """To count with before a worker has said what its page size is."""
        return self.page_size or DEFAULT_PAGE_SIZE

    @property
    def page_dtype(self) -> KVDType:
        """The element type of KV pages."""
        return self.kv_cache_dtype or self.dtype

    def is_eager(self, phase: PhaseName) -> bool:
        """Whether the phase is one of them."""
        return phase in self.eager_phases

    def quantization(self, phase: PhaseName) -> Quantization:
        """The phase's own."""
        return self.prefill_quantization if phase is PhaseName.PREFILL else self.decode_quantization
