"""Computes a step: turns a plan into tensors, runs the model over the paged cache, samples. Holds no sequence."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llm_engine.attention import ROW_MULTIPLE, AttentionRow, TorchAttention
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel
from llm_engine.sampler import UnusableLogits, sample
from llm_engine.step_plan import PlanRow, SampledToken, StepPlan, StepResult


class ModelRunner:
    """One worker's model and cache. ``run`` must always be called from the same thread.

    Every batch of rows is padded to a multiple of four before a matrix product, so that no row's result depends on how many
    others there are (see ``attention``).
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache) -> None:
        assert cache.tensor.dtype == loaded.model.dtype, "weights and cache have one type"
        self._model = loaded.model
        config = loaded.config
        self._attention = TorchAttention(
            cache, scale=config.attention_scale, sliding_windows=[layer.sliding_window for layer in config.layers]
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one forward pass and sample where a row asks for it. A row whose logits are unusable fails alone: its sentence
        stands in ``StepResult.failures``."""
        attention = self._attention.begin_step(
            [
                AttentionRow(num_tokens=len(row.token_ids), start_position=row.start_position, page_ids=row.page_ids)
                for row in plan.rows
            ]
        )
        token_ids = _padded_tensor([token_id for row in plan.rows for token_id in row.token_ids])
        positions = _padded_tensor([position for row in plan.rows for position in _positions(row)])
        hidden = self._model.hidden_states(token_ids, positions, attention)  # [num_tokens, hidden_size]

        last_tokens = list(_last_tokens(plan))
        if not last_tokens:
            return StepResult(tokens=(None,) * len(plan.rows))
        logits = self._model.logits(hidden[_padded_tensor(last_tokens)])  # [num_samples, vocab_size]
        return _sample_rows(plan, logits)


def _positions(row: PlanRow) -> range:
    return range(row.start_position, row.start_position + len(row.token_ids))


def _last_tokens(plan: StepPlan) -> Iterator[int]:
    """Places, among the step's tokens, of those after which a row samples."""
    end = 0
    for row in plan.rows:
        end += len(row.token_ids)
        if row.sample is not None:
            yield end - 1


def _padded_tensor(values: list[int]) -> Tensor:
    """The values, then zeros up to a multiple of ``ROW_MULTIPLE``."""
    return torch.tensor(values + [0] * (-len(values) % ROW_MULTIPLE))


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
