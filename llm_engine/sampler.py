"""Chooses one token from one row of logits. A row's token depends on nothing but that row and its ``SampleSpec``: never on
the batch, on earlier draws or on global state. Knows no sequence and no cache.

This is the reference for ``NativeSampler``, and what chooses where the native kernels do not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from llm_engine.logit_rules import Ids, Logits, apply_logit_rules
from llm_engine.philox import uniform
from llm_engine.step_plan import SampledToken, SampleSpec, StepPlan, StepResult
from serving_core.token_event import TokenLogprobs

_NUM_LIKELY = 512
"""How many of the most likely tokens are ordered first, sixteen times as many next, and all only if need be. Nearly every draw
ends among the first, and sorting the whole vocabulary costs about ten times as much; the result is the same."""

_BLOCK = 16


class UnusableLogits(ValueError):
    """A row of logits from which nothing can be chosen. The runner turns it into that row's failure."""

    @classmethod
    def not_finite(cls) -> UnusableLogits:
        return cls("the model computed logits that are not finite numbers")

    @classmethod
    def all_banned(cls) -> UnusableLogits:
        return cls("every token is banned")


Choice: TypeAlias = SampledToken | UnusableLogits


def step_result(plan: StepPlan, choices: Iterable[Choice]) -> StepResult:
    """The result of a step whose sampled rows, in their order, got these choices."""
    remaining = iter(choices)
    tokens: list[SampledToken | None] = []
    failures: list[str | None] = []
    for row in plan.rows:
        choice = None if row.sample is None else next(remaining)
        failure: str | None = None
        if isinstance(choice, UnusableLogits):
            choice, failure = None, f"No token can be chosen for sequence {row.key}: {choice}."
        tokens.append(choice)
        failures.append(failure)
    return StepResult(tokens=tuple(tokens), failures=tuple(failures) if any(failures) else ())


class Sampler(Protocol):
    """Chooses for the rows of a step."""

    def choose(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[Choice]:
        """A token for each row of logits, float32 [num_rows, vocab_size], or why there is none: as ``sample`` says of the row
        and its spec alone."""


class RowSampler:
    """See ``Sampler``. One row after another."""

    def choose(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[Choice]:
        return [_choice(row, spec) for row, spec in zip(logits.numpy(), specs, strict=True)]


def _choice(logits: Logits, spec: SampleSpec) -> Choice:
    try:
        return sample(logits, spec)
    except UnusableLogits as error:
        return error


def sample(logits: Logits, spec: SampleSpec) -> SampledToken:
    """Choose a token from ``logits`` [vocab_size].

    First come penalties, biases and bans (see ``logit_rules``). Temperature 0 then takes the most likely token, the lowest id
    among equals. Otherwise one Philox number is inverted over the cumulative distribution of the tokens in order of falling
    probability, equals by id: first cut to those that ``min_p`` keeps, then to ``top_k``, then, of what that leaves, to the
    shortest head holding ``top_p`` of the probability, at least one token. Logprobs are those of ``logits`` as they came.
    Raises UnusableLogits when a logit is not finite or every token is banned.
    """
    if not np.isfinite(logits).all():
        raise UnusableLogits.not_finite()
    allowed = apply_logit_rules(logits, spec)
    token_id = int(np.argmax(allowed)) if spec.temperature == 0.0 else _draw(allowed, spec)
    if allowed[token_id] == -np.inf:
        raise UnusableLogits.all_banned()
    if spec.num_logprobs is None:
        return SampledToken(token_id=token_id)
    return SampledToken(token_id=token_id, logprobs=_logprobs(logits, token_id, spec.num_logprobs))


def _draw(logits: Logits, spec: SampleSpec) -> int:
    number = uniform(seed=spec.seed, output_index=spec.output_index, choice_index=spec.choice_index)
    highest = float(logits.max())
    if highest == -np.inf:
        return 0
    ids: Ids | None = None  # None: all
    if spec.min_p > 0.0:
        ids = np.flatnonzero(logits >= highest + spec.temperature * math.log(spec.min_p))
        logits = logits[ids]
    place = _draw_among(logits, highest, number, spec)
    return place if ids is None else int(ids[place])


def _draw_among(logits: Logits, highest: float, number: float, spec: SampleSpec) -> int:
    """The place of the token that ``number`` picks among those that ``min_p`` left."""
    num_kept = min(spec.top_k or len(logits), len(logits))
    # Without top_k the probability to be shared out is that of the whole vocabulary, in order of id; with it, of the head.
    total = None if spec.top_k else float(_weights(logits, highest, spec.temperature).sum())

    num_first = max(spec.top_k, _NUM_LIKELY)
    for num_ordered in (num_first, 16 * num_first, len(logits)):
        order = _most_likely(logits, num_ordered)[:num_kept]
        is_whole = len(order) == num_kept
        cumulative = np.cumsum(_weights(logits[order], highest, spec.temperature))
        mass = float(cumulative[-1]) if total is None else total
        if spec.top_p < 1.0:
            last = int(np.searchsorted(cumulative, spec.top_p * mass, side="left"))
            if last >= len(order) and not is_whole:
                continue  # the head that top_p keeps reaches beyond the tokens ordered so far
            mass = float(cumulative[min(last, len(order) - 1)])
        place = int(np.searchsorted(cumulative, number * mass, side="right"))
        if place < len(order):
            return int(order[place])
        if is_whole:
            break
    # Rounding put the number past the end: take the last token that has any probability.
    return int(order[np.searchsorted(cumulative, cumulative[-1], side="left")])


def _weights(logits: Logits, highest: float, temperature: float) -> npt.NDArray[np.float64]:
    """Probabilities up to one common factor."""
    wide = logits.astype(np.float64)
    wide -= highest
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the highest to exp(-inf)
        wide /= temperature
    return np.exp(wide, out=wide)


def _most_likely(logits: Logits, count: int) -> Ids:
    """The ids of the ``count`` highest logits, highest first, equals by id."""
    candidates = np.flatnonzero(logits >= _bound(logits, count)) if count < len(logits) else np.arange(len(logits))
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def _bound(logits: Logits, count: int) -> np.float32:
    """A logit that at least ``count`` reach, and not many more: among the maxima of blocks, where there are enough of them."""
    maxima = logits[: len(logits) // _BLOCK * _BLOCK].reshape(_BLOCK, -1).max(axis=0)
    among = maxima if count <= len(maxima) else logits
    return np.float32(np.partition(among, len(among) - count)[len(among) - count])


def _logprobs(logits: Logits, token_id: int, count: int) -> TokenLogprobs:
    wide = logits.astype(np.float64)
    highest = wide.max()
    log_total = float(highest + np.log(np.exp(wide - highest).sum()))
    top = tuple((int(other), float(wide[other]) - log_total) for other in _most_likely(logits, count)) if count else ()
    return TokenLogprobs(logprob=float(wide[token_id]) - log_total, top=top)
