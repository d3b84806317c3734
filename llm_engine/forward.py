"""The forward pass of one phase: from a step's rows to the logits that are to be sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from llm_engine.attention import AttentionBackend, AttentionRow
from llm_engine.decoder import Decoder
from llm_engine.device import to_device
from llm_engine.step_plan import PlanRow, StepPlan


class Forward(Protocol):
    """Computes a phase's steps over the paged cache, each in full before the next."""

    def logits(self, plan: StepPlan) -> Tensor | None:
        """Float32 [num_samples or more, num_tokens], on the model's device: one row for each row of the plan that samples, in
        their order. None where no row does. Valid until the next step."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LateTokens:
    """Token ids that only the device knows yet: ``token_ids`` [num_late], int64, for the ``places`` [num_late], int64, among
    a step's tokens."""

    places: Tensor
    token_ids: Tensor

    def put_into(self, token_ids: Tensor) -> None:
        """Complete the step's ``token_ids``, int64 [num_tokens]."""
        token_ids.index_copy_(0, self.places, self.token_ids)


class DeviceForward(Protocol):
    """A ``Forward`` that may begin before all of the step's tokens are known to the host."""

    def logits(self, plan: StepPlan, late: LateTokens | None = None) -> Tensor | None:
        """See ``Forward``. ``late`` stand for those that are ``NOT_YET_KNOWN``. Returns when all is asked of the device."""


class EagerForward:
    """See ``Forward`` and ``DeviceForward``. For rows of any length; those of a matrix product are padded to a multiple of
    ``row_multiple``."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, *, row_multiple: int) -> None:
        self._decoder = decoder
        self._attention = attention
        self._row_multiple = row_multiple

    def logits(self, plan: StepPlan, late: LateTokens | None = None) -> Tensor | None:
        step = self._attention.begin_step(attention_rows(plan.rows))
        token_ids, positions = self._padded(token_ids_of(plan.rows)), self._padded(positions_of(plan.rows))
        if late is not None:
            late.put_into(token_ids)
        sampled = last_tokens(plan.rows)
        hidden = self._decoder.hidden_states(token_ids, positions, step, self._padded(sampled))
        return self._decoder.logits(hidden) if sampled else None

    def _padded(self, values: list[int]) -> Tensor:
        """The values, then zeros up to a multiple, on the model's device."""
        padding = [0] * (-len(values) % self._row_multiple)
        return to_device(torch.tensor(values + padding, dtype=torch.int64), self._decoder.device)


def attention_rows(rows: Sequence[PlanRow]) -> list[AttentionRow]:
    """The rows as attention sees them."""
    return [
        AttentionRow(num_tokens=len(row.token_ids), start_position=row.start_position, page_ids=row.page_ids) for row in rows
    ]


def token_ids_of(rows: Sequence[PlanRow]) -> list[int]:
    """Of all tokens of the step, one row after another."""
    return [token_id for row in rows for token_id in row.token_ids]


def positions_of(rows: Sequence[PlanRow]) -> list[int]:
    """Of the same tokens in their sequences."""
    return [row.start_position + index for row in rows for index in range(len(row.token_ids))]


def last_tokens(rows: Sequence[PlanRow]) -> list[int]:
    """Places, among the step's tokens, of those after which a row samples."""
    ends = accumulate(len(row.token_ids) for row in rows)
    return [end - 1 for row, end in zip(rows, ends, strict=True) if row.sample is not None]
