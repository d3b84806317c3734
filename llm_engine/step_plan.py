"""One engine step as data: what a phase wants computed and what came of it. Knows no live sequence and no tensor."""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.packed_ids import NO_IDS, PackedIds
from serving_core.ids import PageId, SequenceKey
from serving_core.token_event import TokenLogprobs
from serving_core.worker_status import PhaseName

NOT_YET_KNOWN = -1
"""Among a row's ``token_ids``: what the phase's step before, which is still under way, samples for the same sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """What is held against tokens that were there before: ``repetition`` against those of prompt and answer, ``presence`` and
    ``frequency`` against those of the answer alone. Meaning and ranges: ``SamplingParams``."""

    repetition: float
    presence: float
    frequency: float
    prompt_token_ids: PackedIds = NO_IDS
    output_token_ids: PackedIds = NO_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """How to choose one token after the last position of a row.

    ``output_index`` is the token's place in the answer (0 is the first): with ``seed`` and ``choice_index`` it is all that
    randomness depends on. ``banned_token_ids`` cannot be chosen (end tokens before min_tokens). ``num_logprobs`` is None
    when no logprobs are wanted; ``penalties`` is None when there are none. ``logit_bias`` holds (token id, bias).
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice_index: int
    output_index: int
    banned_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    min_p: float = 0.0
    penalties: Penalties | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Consecutive tokens of one sequence to be computed in this step.

    ``token_ids`` take positions ``start_position ..``; keys and values of all earlier positions are in the cache. ``page_ids``
    covers every position up to the last of this row, in order. ``sample`` is None when the row ends inside a prompt. A token
    that is ``NOT_YET_KNOWN`` is the row's only one.
    """

    key: SequenceKey
    token_ids: tuple[int, ...]
    start_position: int
    page_ids: tuple[PageId, ...]
    sample: SampleSpec | None

    @property
    def is_ahead(self) -> bool:
        """Whether it goes on from a step under way."""
        return self.token_ids == (NOT_YET_KNOWN,)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass over a ragged batch of rows, for one phase. Never empty; at most one row a sequence."""

    phase: PhaseName
    rows: tuple[PlanRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """The token chosen for one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step produced: ``tokens[i]`` belongs to ``plan.rows[i]`` and is None where that row asked for none.

    ``failures[i]`` is one sentence when that row alone could not be computed, else None; empty when every row went well.
    """

    tokens: tuple[SampledToken | None, ...]
    failures: tuple[str | None, ...] = ()
