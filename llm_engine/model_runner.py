"""Computes a step: turns a plan into tensors, runs the model over the paged cache, samples. Holds no sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_engine.attention import ROW_MULTIPLE, TorchAttention
from llm_engine.cuda.cuda_forward import cuda_forward
from llm_engine.decoder import Decoder
from llm_engine.device import CPU, settle, to_host
from llm_engine.forward import EagerForward, Forward
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel
from llm_engine.model_config import ModelConfig
from llm_engine.native.library import NativeLibrary
from llm_engine.native_attention import NativeAttention
from llm_engine.native_prefill_attention import NativePrefillAttention
from llm_engine.native_sampler import NativeSampler
from llm_engine.recorded_forward import RecordedForward
from llm_engine.sampler import RowSampler, Sampler, UnusableLogits
from llm_engine.step_plan import SampledToken, StepPlan, StepResult
from serving_core.worker_status import PhaseName


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _PhaseEngine:
    """What computes the steps of a phase."""

    forward: Forward
    sampler: Sampler


class ModelRunner:
    """One worker's models, one for each of its phases, and its cache. ``run`` must always be called from the same thread.

    No row's result depends on how many others there are: the native kernels compute each for itself, and for torch's every
    batch of rows is padded to a multiple of four before a matrix product (see ``attention``). What holds on CUDA is less, see
    docs/gpu.md. Decode steps of up to ``max_recorded_rows`` rows, each a token, are recorded at the start, as calls of native
    kernels or as CUDA graphs, and replayed.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, *, max_recorded_rows: int = 0) -> None:
        self._device = cache.tensor.device
        max_recorded_rows = min(max_recorded_rows, cache.num_pages)  # each of them writes into a page of its own
        self._engines = {phase: _engine_of(phase, loaded, cache, max_recorded_rows) for phase in loaded.phases}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one forward pass and sample where a row asks for it. A row whose logits are unusable fails alone: its sentence
        stands in ``StepResult.failures``."""
        engine = self._engines[plan.phase]
        logits = engine.forward.logits(plan)
        if logits is None:
            settle(self._device)  # others may read the pages as soon as the step is over
            return StepResult(tokens=(None,) * len(plan.rows))
        return _sample_rows(plan, to_host(logits), engine.sampler)


def _engine_of(phase: PhaseName, loaded: LoadedModel, cache: KVCache, max_recorded_rows: int) -> _PhaseEngine:
    model, config = loaded.phases[phase], loaded.config
    if model.decoder.device != CPU:
        forward = cuda_forward(phase, model.decoder, config, cache, model.paged_kernel, max_graph_rows=max_recorded_rows)
        return _PhaseEngine(forward=forward, sampler=RowSampler())
    if model.library is None:
        windows = [layer.sliding_window for layer in config.layers]
        attention = TorchAttention(cache, scale=config.attention_scale, sliding_windows=windows)
        return _PhaseEngine(forward=EagerForward(model.decoder, attention, row_multiple=ROW_MULTIPLE), sampler=RowSampler())
    forward = _native_forward(phase, model.decoder, model.library, config, cache, max_recorded_rows=max_recorded_rows)
    return _PhaseEngine(forward=forward, sampler=NativeSampler(model.library))


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


def _sample_rows(plan: StepPlan, logits: Tensor, sampler: Sampler) -> StepResult:
    """logits [num_samples, vocab_size], and padding after them."""
    specs = [row.sample for row in plan.rows if row.sample is not None]
    choices = iter(sampler.choose(logits[: len(specs)], specs))
    tokens: list[SampledToken | None] = []
    failures: list[str | None] = []
    for row in plan.rows:
        choice = None if row.sample is None else next(choices)
        failure: str | None = None
        if isinstance(choice, UnusableLogits):
            choice, failure = None, f"No token can be chosen for sequence {row.key}: {choice}."
        tokens.append(choice)
        failures.append(failure)
    return StepResult(tokens=tuple(tokens), failures=tuple(failures) if any(failures) else ())
