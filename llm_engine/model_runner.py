"""Computes a step: turns a plan into tensors, runs the model over the paged cache, samples. Holds no sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_engine.attention import ROW_MULTIPLE, TorchAttention
from llm_engine.cuda.cuda_forward import cuda_forward
from llm_engine.cuda.device_steps import DeviceSteps
from llm_engine.decoder import Decoder
from llm_engine.device import CPU
from llm_engine.forward import EagerForward, Forward
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel
from llm_engine.model_config import ModelConfig
from llm_engine.native.library import NativeLibrary
from llm_engine.native_attention import NativeAttention
from llm_engine.native_prefill_attention import NativePrefillAttention
from llm_engine.native_sampler import NativeSampler
from llm_engine.phase import Runner, StepUnderWay
from llm_engine.recorded_forward import RecordedForward
from llm_engine.sampler import RowSampler, Sampler, step_result
from llm_engine.step_plan import StepPlan, StepResult
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _HostSteps:
    """See ``Runner``: for one phase, on the CPU."""

    forward: Forward
    sampler: Sampler

    def run(self, plan: StepPlan) -> StepResult:
        logits = self.forward.logits(plan)
        if logits is None:
            return step_result(plan, ())
        specs = [row.sample for row in plan.rows if row.sample is not None]
        return step_result(plan, self.sampler.choose(logits[: len(specs)], specs))


class ModelRunner:
    """One worker's models, one for each of its phases, and its cache. ``run`` must always be called from the same thread.

    No row's result depends on how many others there are: the native kernels compute each for itself, and for torch's every
    batch of rows is padded to a multiple of four before a matrix product (see ``attention``). What holds on CUDA is less, see
    docs/gpu.md. Decode steps of up to ``max_recorded_rows`` rows, each a token, are recorded at the start, as calls of native
    kernels or as CUDA graphs, and replayed. With ``has_async_scheduling`` decode steps on CUDA are only begun.
    """

    def __init__(
        self, loaded: LoadedModel, cache: KVCache, *, max_recorded_rows: int = 0, has_async_scheduling: bool = False
    ) -> None:
        max_recorded_rows = min(max_recorded_rows, cache.num_pages)  # each of them writes into a page of its own
        self._steps = {
            phase: _steps_of(phase, loaded, cache, max_recorded_rows, has_async_scheduling=has_async_scheduling)
            for phase in loaded.phases
        }

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult | StepUnderWay:
        """Run one forward pass and sample where a row asks for it. A row whose logits are unusable fails alone: its sentence
        stands in ``StepResult.failures``."""
        return self._steps[plan.phase].run(plan)


def _steps_of(
    phase: PhaseName, loaded: LoadedModel, cache: KVCache, max_recorded_rows: int, *, has_async_scheduling: bool
) -> Runner:
    model, config = loaded.phases[phase], loaded.config
    if model.decoder.device != CPU:
        on_device = cuda_forward(phase, model.decoder, config, cache, model.paged_kernel, max_graph_rows=max_recorded_rows)
        return DeviceSteps(on_device, model.decoder.device, is_ahead=has_async_scheduling and phase is PhaseName.DECODE)
    if model.library is None:
        windows = [layer.sliding_window for layer in config.layers]
        attention = TorchAttention(cache, scale=config.attention_scale, sliding_windows=windows)
        return _HostSteps(forward=EagerForward(model.decoder, attention, row_multiple=ROW_MULTIPLE), sampler=RowSampler())
    if cache.layout.dtype is KVDType.FP8:
        raise ConfigError("--kv-cache-dtype is fp8, which is for GPUs, and this worker computes on CPUs: give int8")
    forward = _native_forward(phase, model.decoder, model.library, config, cache, max_recorded_rows=max_recorded_rows)
    return _HostSteps(forward=forward, sampler=NativeSampler(model.library))


def _native_forward(
    phase: PhaseName,
    decoder: Decoder,
    library: NativeLibrary,
    config: ModelConfig,
    cache: KVCache,
    *,
    max_recorded_rows: int,
) -> Forward:
    scale, windows = config.attention_scale, [layer.sliding_window for layer in config.layers]
    if phase is not PhaseName.DECODE:
        prefill_attention = NativePrefillAttention(cache, library, scale=scale, sliding_windows=windows)
        return EagerForward(decoder, prefill_attention, row_multiple=1)
    attention = NativeAttention(cache, library, scale=scale, sliding_windows=windows)
    eager = EagerForward(decoder, attention, row_multiple=1)
    if max_recorded_rows == 0 or config.experts is not None:  # which experts compute is only known within the step
        return eager
    max_row_pages = cache.max_row_pages(config.max_model_len)
    return RecordedForward(decoder, attention, library, max_tokens=max_recorded_rows, max_row_pages=max_row_pages, eager=eager)
