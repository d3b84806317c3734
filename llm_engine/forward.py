"""The forward pass of one phase: from a step's rows to the logits that are to be sampled from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from llm_engine.attention import AttentionBackend, AttentionRow
from llm_engine.decoder import Decoder
from llm_engine.step_plan import PlanRow, StepPlan


class Forward(Protocol):
    """Computes a phase's steps over the paged cache, each in full before the next."""

    def logits(self, plan: StepPlan) -> Tensor | None:
        """Float32 [num_samples or more, num_tokens], on the model's device: one row for each row of the plan that samples, in
        their order. None where no row does. Valid until the next step."""


class EagerForward:
    """See ``Forward``. For rows of any length; those of a matrix product are padded to a multiple of ``row_multiple``."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, *, row_multiple: int) -> None:
        self._decoder = decoder
        self._attention = attention
        self._row_multiple = row_multiple

    def logits(self, plan: StepPlan) -> Tensor | None:
        step = self._attention.begin_step(attention_rows(plan.rows))
        token_ids = self._padded([token_id for row in plan.rows for token_id in row.token_ids])
        positions = self._padded([position for row in plan.rows for position in _positions(row)])
        hidden = self._decoder.hidden_states(token_ids, positions, step)  # [num_tokens, hidden_size]
        last_tokens = list(_last_tokens(plan))
        return self._decoder.logits(hidden[self._padded(last_tokens)]) if last_tokens else None

    def _padded(self, values: list[int]) -> Tensor:
        """The values, then zeros up to a multiple, on the model's device."""
        return torch.tensor(values + [0] * (-len(values) % self._row_multiple)).to(self._decoder.device)


def attention_rows(rows: Sequence[PlanRow]) -> list[AttentionRow]:
    """The rows as attention sees them."""
    return [
        AttentionRow(num_tokens=len(row.token_ids), start_position=row.start_position, page_ids=row.page_ids) for row in rows
    ]


def _positions(row: PlanRow) -> range:
    return range(row.start_position, row.start_position + len(row.token_ids))


def _last_tokens(plan: StepPlan) -> Iterator[int]:
    """Places, among the step's tokens, of those after which a row samples."""
    end = 0
    for row in plan.rows:
        end += len(row.token_ids)
        if row.sample is not None:
            yield end - 1
