"""From what was asked for to one spec a worker: resolves everything that depends on the model and on the cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from llm_engine.memory_budget import check_step_budget, num_pages_for_budget
from llm_engine.model_config import ModelConfig
from llm_engine.weight_plan import usable_quantization
from serving_core.engine_config import EngineConfig
from serving_core.errors import ConfigError
from serving_core.ids import WorkerId
from serving_core.worker_status import PhaseName
from twinpool.core_plan import PREFILL_NICENESS, CorePlan, plan_cores
from twinpool.engine_flags import EngineFlags
from twinpool.serve_config import ServeConfig
from twinpool.worker_spec import WorkerSpec


def plan_server_cores(config: ServeConfig, cores: Sequence[int]) -> CorePlan:
    """Divide ``cores`` between the server's workers and everything else."""
    return plan_cores(
        cores,
        num_prefill_workers=config.num_prefill_workers,
        num_decode_workers=1 if config.is_colocated else config.num_decode_workers,
        prefill_threads=config.prefill.threads,
        decode_threads=config.decode.threads,
    )


def plan_node_cores(config: ServeConfig, cores_per_worker: int) -> CorePlan:
    """Cores of workers on nodes that others run: as many kernel threads as the node has cores for each, and nothing pinned."""
    return CorePlan(
        shared=(),
        decode=((),) * (1 if config.is_colocated else config.num_decode_workers),
        decode_threads=config.decode.threads or cores_per_worker,
        prefill_threads=config.prefill.threads or cores_per_worker,
    )


def make_worker_specs(
    config: ServeConfig, model: ModelConfig, core_plan: CorePlan, router_addresses: Sequence[str]
) -> tuple[WorkerSpec, ...]:
    """One spec a worker. Raises ``ConfigError`` for a window that the model does not have, a KV cache too small for it, a step
    budget that suits neither, or a quantization that the weights do not allow."""
    decode = [_decode_engine(config, model, core_plan, cores) for cores in core_plan.decode]
    if config.is_colocated:
        # each phase keeps its own step budget: see EngineConfig
        engine = dataclasses.replace(decode[0], max_num_batched_tokens=config.prefill.max_num_batched_tokens)
        engines = [("colocated-0", frozenset(PhaseName), engine)]
    else:
        prefill = _prefill_engine(config, model, core_plan)
        engines = [(f"prefill-{i}", frozenset({PhaseName.PREFILL}), prefill) for i in range(config.num_prefill_workers)]
        engines += [(f"decode-{i}", frozenset({PhaseName.DECODE}), engine) for i, engine in enumerate(decode)]
    for _, phases, engine in engines:
        _check_pages(engine, model, phases)
    specs = tuple(
        WorkerSpec(
            worker_id=WorkerId(worker_id),
            phases=phases,
            model_path=config.model.path,
            model_name=config.served_model_name,
            engine=engine,
            router_addresses=tuple(router_addresses),
            transfer=config.transfer,
        )
        for worker_id, phases, engine in engines
    )
    check_quantizations(config, specs, model)  # whether their machines have the kernels is yet to be found out
    return specs


def check_quantizations(
    config: ServeConfig, specs: Sequence[WorkerSpec], model: ModelConfig, *, why_no_kernels: str | None = None
) -> None:
    """Raises ``ConfigError`` for a quantization that cannot be. ``why_no_kernels``: see ``NoKernels``; None where they run."""
    for spec in specs:
        for phase in spec.phases:
            usable_quantization(
                spec.engine.quantization(phase),
                phase,
                dtype=spec.engine.dtype,
                config=model,
                has_kernels=why_no_kernels is None,
                has_gpu=config.is_on_gpus,
                is_eager=spec.engine.is_eager(phase),
                flag=config.flags_of(phase).quantization_flag,
                why_no_kernels=why_no_kernels,
            )


def _decode_engine(config: ServeConfig, model: ModelConfig, core_plan: CorePlan, cores: tuple[int, ...]) -> EngineConfig:
    engine = _engine(config, config.decode, model, num_threads=core_plan.decode_threads)
    return dataclasses.replace(engine, cpu_cores=cores)


def _prefill_engine(config: ServeConfig, model: ModelConfig, core_plan: CorePlan) -> EngineConfig:
    engine = _engine(config, config.prefill, model, num_threads=core_plan.prefill_threads)
    is_pinned = any(core_plan.decode)
    return dataclasses.replace(engine, cpu_cores=core_plan.shared if is_pinned else (), niceness=PREFILL_NICENESS)


def _engine(config: ServeConfig, flags: EngineFlags, model: ModelConfig, *, num_threads: int) -> EngineConfig:
    max_model_len = flags.max_model_len or model.max_model_len
    if max_model_len > model.max_model_len:
        raise ConfigError(f"--max-model-len is {max_model_len}, but {config.model.name} was made for {model.max_model_len}")
    return EngineConfig(
        dtype=flags.dtype,
        kv_cache_dtype=flags.kv_cache_dtype,
        page_size=flags.block_size,
        max_model_len=max_model_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        kv_cache_memory_bytes=flags.kv_cache_memory_bytes,
        num_threads=num_threads,
        prefill_quantization=config.prefill.quantization,
        decode_quantization=config.decode.quantization,
        has_prefix_cache=flags.enable_prefix_caching,
        has_async_scheduling=flags.async_scheduling,
        eager_phases=frozenset(phase for phase in PhaseName if config.flags_of(phase).enforce_eager),
        lease_s=config.lease_s,
    )


def _check_pages(engine: EngineConfig, model: ModelConfig, phases: frozenset[PhaseName]) -> None:
    max_model_len = engine.max_model_len or model.max_model_len
    layout = model.page_layout(page_size=engine.planned_page_size, dtype=engine.page_dtype)
    num_pages = num_pages_for_budget(layout, engine.kv_cache_memory_bytes, max_model_len)
    if PhaseName.PREFILL in phases:
        check_step_budget(
            engine.max_num_batched_tokens, max_model_len=max_model_len, num_cache_tokens=num_pages * engine.planned_page_size
        )
