"""Computes a step: turns a plan into tensors, runs the model over the paged cache, samples. Holds no sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_engine.attention import ROW_MULTIPLE, AttentionBackend, AttentionRow, TorchAttention
from llm_engine.decoder import Decoder
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel
from llm_engine.native_attention import NativeAttention
from llm_engine.sampler import UnusableLogits, sample
from llm_engine.step_plan import PlanRow, SampledToken, StepPlan, StepResult
from serving_core.worker_status import PhaseName


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _PhaseEngine:
    """What computes the steps of a phase. The rows of a matrix product are padded to a multiple of ``row_multiple``."""

    decoder: Decoder
    attention: AttentionBackend
    row_multiple: int


class ModelRunner:
    """One worker's models, one for each of its phases, and its cache. ``run`` must always be called from the same thread.

    No row's result depends on how many others there are: the native kernels compute each for itself, and for torch's every
    batch of rows is padded to a multiple of four before a matrix product (see ``attention``).
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache) -> None:
        decoders = [model.decoder for model in loaded.phases.values()]
        assert all(decoder.dtype == cache.tensor.dtype for decoder in decoders), "weights and cache have one type"
        self._engines = {phase: _engine_of(phase, loaded, cache) for phase in loaded.phases}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one forward pass and sample where a row asks for it. A row whose logits are unusable fails alone: its sentence
        stands in ``StepResult.failures``."""
        engine = self._engines[plan.phase]
        attention = engine.attention.begin_step(
            [
                AttentionRow(num_tokens=len(row.token_ids), start_position=row.start_position, page_ids=row.page_ids)
                for row in plan.rows
            ]
        )
        token_ids = _padded_tensor([token_id for row in plan.rows for token_id in row.token_ids], engine.row_multiple)
        positions = _padded_tensor([position for row in plan.rows for position in _positions(row)], engine.row_multiple)
        hidden = engine.decoder.hidden_states(token_ids, positions, attention)  # [num_tokens, hidden_size]

        last_tokens = list(_last_tokens(plan))
        if not last_tokens:
            return StepResult(tokens=(None,) * len(plan.rows))
        logits = engine.decoder.logits(hidden[_padded_tensor(last_tokens, engine.row_multiple)])  # [num_samples, vocab_size]
        return _sample_rows(plan, logits)


def _engine_of(phase: PhaseName, loaded: LoadedModel, cache: KVCache) -> _PhaseEngine:
    """Prompts attend through torch whatever their weights are: its kernel takes many tokens at once."""
    model, config = loaded.phases[phase], loaded.config
    windows = [layer.sliding_window for layer in config.layers]
    attention: AttentionBackend
    if model.library is not None and phase is PhaseName.DECODE:
        attention = NativeAttention(cache, model.library, scale=config.attention_scale, sliding_windows=windows)
    else:
        attention = TorchAttention(cache, scale=config.attention_scale, sliding_windows=windows)
    row_multiple = ROW_MULTIPLE if model.library is None else 1
    return _PhaseEngine(decoder=model.decoder, attention=attention, row_multiple=row_multiple)


def _positions(row: PlanRow) -> range:
    return range(row.start_position, row.start_position + len(row.token_ids))


def _last_tokens(plan: StepPlan) -> Iterator[int]:
    """Places, among the step's tokens, of those after which a row samples."""
    end = 0
    for row in plan.rows:
        end += len(row.token_ids)
        if row.sample is not None:
            yield end - 1


def _padded_tensor(values: list[int], multiple: int) -> Tensor:
    """The values, then zeros up to a multiple."""
    return torch.tensor(values + [0] * (-len(values) % multiple))


def _sample_rows(plan: StepPlan, logits: Tensor) -> StepResult:
    rows_of_logits = iter(logits.numpy())
    tokens: list[SampledToken | None] = []
    failures: list[str | None] = []
    for row in plan.rows:
        token: SampledToken | None = None
        failure: str | None = None
        if row.sample is not None:
            try:
                token = sample(next(rows_of_logits), row.sample)
            except UnusableLogits as error:
                failure = f"No token can be chosen for sequence {row.key}: {error}."
        tokens.append(token)
        failures.append(failure)
    return StepResult(tokens=tuple(tokens), failures=tuple(failures) if any(failures) else ())
