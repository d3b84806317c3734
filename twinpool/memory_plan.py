"""Whether a server's workers fit into this machine's memory, all together, before the first of them is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.decode_scheduler import MAX_REPLAY_TOKENS
from llm_engine.checkpoint import StoredModel
from llm_engine.memory_budget import StepSize, longest_window, num_pages_for_budget, workspace_bytes
from llm_engine.model_config import ModelConfig
from llm_engine.page_hash import page_hashes
from llm_engine.weight_plan import has_native_form, usable_quantization, weight_bytes
from serving_core.engine_config import MIN_MODEL_LEN, Quantization
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from twinpool.byte_size import format_byte_size
from twinpool.worker_spec import WorkerSpec

SERVER_BYTES = 900 * 2**20
"""The router's process and Ray's own, as measured on Linux."""

WORKER_PROCESS_BYTES = 350 * 2**20
"""A worker's process before it has loaded anything: Python, torch, Ray, gRPC."""

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """What one worker will take. ``min_kv_cache_bytes`` is the smallest KV cache that holds one sequence of its window."""

    weight_bytes: int
    workspace_bytes: int
    kv_cache_dtype: KVDType
    kv_cache_bytes: int
    min_kv_cache_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache."""
        return WORKER_PROCESS_BYTES + self.weight_bytes + self.workspace_bytes


def worker_memory(spec: WorkerSpec, stored: StoredModel, *, has_kernels: bool) -> WorkerMemory:
    """``has_kernels``: the worker's machine can run the native kernels. Raises ``ConfigError`` for a KV cache that is too small
    for one sequence, and for a quantization that cannot be."""
    engine, model = spec.engine, stored.config
    max_model_len = engine.max_model_len or model.max_model_len
    layout = model.page_layout(page_size=engine.planned_page_size, dtype=engine.page_dtype)
    num_pages = num_pages_for_budget(layout, engine.kv_cache_memory_bytes, max_model_len)
    steps = {
        PhaseName.PREFILL: StepSize.of_prefill(
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=max_model_len,
            page_size=engine.planned_page_size,
            num_pages=num_pages,
        ),
        PhaseName.DECODE: StepSize.of_decode(
            max_num_seqs=engine.max_num_seqs,
            max_replay_tokens=MAX_REPLAY_TOKENS,
            max_model_len=max_model_len,
            page_size=engine.planned_page_size,
            num_pages=num_pages,
        ),
    }
    forms: dict[bool, list[Quantization]] = {}  # of the phases that the native kernels compute, and of the others
    workspaces = []
    for phase in spec.phases:
        is_eager = engine.is_eager(phase)
        is_native = has_native_form(engine.dtype, model, has_kernels=has_kernels and not is_eager)
        asked = engine.quantization(phase)
        forms.setdefault(is_native, []).append(
            usable_quantization(asked, phase, dtype=engine.dtype, config=model, has_kernels=has_kernels, is_eager=is_eager)
        )
        workspaces.append(
            workspace_bytes(model, phase, engine.dtype, steps[phase], cache_dtype=engine.page_dtype, is_native=is_native)
        )
    return WorkerMemory(
        weight_bytes=sum(
            weight_bytes(stored, engine.dtype, quantizations, has_kernels=is_native)
            for is_native, quantizations in forms.items()
        ),
        workspace_bytes=max(workspaces),
        kv_cache_dtype=layout.dtype,
        kv_cache_bytes=num_pages * layout.page_bytes,
        min_kv_cache_bytes=layout.num_pages_for(max_model_len) * layout.page_bytes,
    )


def check_memory(specs: Sequence[WorkerSpec], stored: StoredModel, available_bytes: int, *, has_kernels: bool) -> None:
    """Raises ``ConfigError`` when the workers together would need more than ``available_bytes``. It names the KV cache that
    would fit, or says that none would."""
    workers = [worker_memory(spec, stored, has_kernels=has_kernels) for spec in specs]
    fixed_bytes = SERVER_BYTES + sum(worker.fixed_bytes for worker in workers)
    needed_bytes = fixed_bytes + sum(worker.kv_cache_bytes for worker in workers)
    if needed_bytes <= available_bytes:
        return
    parts = "; ".join(f"{spec.worker_id}: {describe_memory(worker)}" for spec, worker in zip(specs, workers, strict=True))
    what = (
        f"the server needs {format_byte_size(needed_bytes)} of memory and this machine has {format_byte_size(available_bytes)} "
        f"left ({parts})"
    )
    fitting_bytes = (available_bytes - fixed_bytes) // len(workers) // _MIB * _MIB
    if fitting_bytes >= max(worker.min_kv_cache_bytes for worker in workers):
        raise ConfigError(f"{what}: give --kv-cache-memory-bytes of at most {fitting_bytes // _MIB}MiB")
    window = min(_window_that_fits(spec, stored, fitting_bytes) for spec in specs)
    if window >= MIN_MODEL_LEN:
        raise ConfigError(
            f"{what}: give --kv-cache-memory-bytes of at most {fitting_bytes // _MIB}MiB and --max-model-len of at most "
            f"{window}, or fewer workers"
        )
    raise ConfigError(f"{what}: no KV cache is small enough for that; give fewer workers or a smaller model")


def check_warm_prompts(specs: Sequence[WorkerSpec], model: ModelConfig, warm_prompts: Sequence[tuple[int, ...]]) -> None:
    """Raises ``ConfigError`` when the KV cache of a worker that keeps prompts cannot hold all warm prompts, given as token ids,
    at the same time: some would push others out before the first request came."""
    for spec in specs:
        engine = spec.engine
        if not engine.has_prefix_cache:
            continue
        page_size = engine.planned_page_size
        layout = model.page_layout(page_size=page_size, dtype=engine.page_dtype)
        num_pages = num_pages_for_budget(layout, engine.kv_cache_memory_bytes, engine.max_model_len or model.max_model_len)
        full_pages = {page for ids in warm_prompts for page in page_hashes(ids, page_size=page_size, salt=b"")}
        if len(full_pages) > num_pages:
            needed_mib = -(-len(full_pages) * layout.page_bytes // _MIB)
            raise ConfigError(
                f"the warm prompts take {len(full_pages)} pages of {page_size} tokens together, and the KV cache of "
                f"{spec.worker_id} has {num_pages}: give --kv-cache-memory-bytes of more than {needed_mib}MiB, or fewer"
            )


def describe_memory(worker: WorkerMemory) -> str:
    """Weights, workspace and KV cache for a reader."""
    return (
        f"weights {format_byte_size(worker.weight_bytes)}, workspace up to {format_byte_size(worker.workspace_bytes)}, "
        f"KV cache {format_byte_size(worker.kv_cache_bytes)} of {worker.kv_cache_dtype.value}"
    )


def _window_that_fits(spec: WorkerSpec, stored: StoredModel, kv_cache_bytes: int) -> int:
    layout = stored.config.page_layout(page_size=spec.engine.planned_page_size, dtype=spec.engine.page_dtype)
    return longest_window(layout, kv_cache_bytes)
