"""Chooses tokens where the logits lie, so that the next step can begin before the host knows them.

The tokens are those of ``sampler``, which has the definition. Only sums over a vocabulary may round otherwise here, which moves
the border between two tokens that share a drawn number by one part in 10**15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llm_engine.device import HostCopies, to_device
from llm_engine.logit_rules import LogitChanges
from llm_engine.philox import uniform
from llm_engine.sampler import Choice, UnusableLogits
from llm_engine.step_plan import SampledToken, SampleSpec
from serving_core.token_event import TokenLogprobs

_ROWS_AT_ONCE = 16
"""So many rows are put in order at a time, which bounds the memory that takes: 70 MB for 128,000 tokens."""


class ChosenTokens:
    """``token_ids`` [num_rows], int64, are on the device, and some token where none could be chosen.

    ``copies`` are of these, whether all logits are finite and whether the token is ruled out, [num_rows] each; then of each of
    ``groups``, which are rows with logprobs, what ``_logprobs`` returns."""

    def __init__(
        self, token_ids: Tensor, copies: HostCopies, specs: Sequence[SampleSpec], groups: Sequence[Sequence[int]]
    ) -> None:
        self.token_ids = token_ids
        self._copies = copies
        self._specs = specs
        self._groups = groups

    def wait(self) -> list[Choice]:
        """A token for each row or why there is none, once the device has chosen."""
        token_ids, is_finite, is_banned, *of_groups = (tensor.tolist() for tensor in self._copies.wait())
        logprobs: dict[int, TokenLogprobs] = {}
        for number, rows in enumerate(self._groups):
            for row, own, top_ids, top in zip(rows, *of_groups[3 * number : 3 * number + 3], strict=True):
                count = self._specs[row].num_logprobs
                logprobs[row] = TokenLogprobs(logprob=own, top=tuple(zip(top_ids[:count], top[:count], strict=True)))
        choices: list[Choice] = []
        for row, token_id in enumerate(token_ids):
            if not is_finite[row]:
                choices.append(UnusableLogits.not_finite())
            elif is_banned[row]:
                choices.append(UnusableLogits.all_banned())
            else:
                choices.append(SampledToken(token_id=token_id, logprobs=logprobs.get(row)))
        return choices


def choose_tokens(logits: Tensor, specs: Sequence[SampleSpec]) -> ChosenTokens:
    """A token for each row of logits, float32 [num_rows, vocab_size], on any device. Waits for nothing."""
    allowed = _allowed(logits, specs)
    token_ids = _most_likely(allowed)
    drawn = [row for row, spec in enumerate(specs) if spec.temperature > 0.0]
    for rows in _portions(drawn):
        places = to_device(torch.tensor(rows), logits.device)
        token_ids[places] = _draw(allowed[places], [specs[row] for row in rows])
    is_finite = logits.isfinite().all(1)
    is_banned = allowed.gather(1, token_ids.unsqueeze(1)).squeeze(1) == -math.inf
    groups = list(_portions([row for row, spec in enumerate(specs) if spec.num_logprobs is not None]))
    of_groups = [tensor for rows in groups for tensor in _logprobs(logits, token_ids, rows, specs)]
    return ChosenTokens(token_ids, HostCopies.begin([token_ids, is_finite, is_banned, *of_groups]), specs, groups)


def _allowed(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """The logits to choose from; see ``logit_rules``."""
    changes = [(row, LogitChanges.of(spec, logits.shape[1])) for row, spec in enumerate(specs)]
    changing = [(row, change) for row, change in changes if change is not None]
    if not changing:
        return logits
    rows = torch.cat([torch.full_like(change.ids, row) for row, change in changing])
    together = LogitChanges.joined([change for _, change in changing]).to(logits.device)
    places = (to_device(rows, logits.device), together.ids)
    return logits.index_put(places, together.applied_to(logits[places]))


def _most_likely(logits: Tensor) -> Tensor:
    """The lowest id among the highest logits of each row, [num_rows]."""
    num_tokens = logits.shape[1]
    ids = torch.arange(num_tokens, device=logits.device)
    is_highest = logits == logits.amax(1, keepdim=True)
    return torch.where(is_highest, ids, num_tokens - 1).amin(1)


def _draw(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """A token of each row by its Philox number, [num_rows]."""
    num_tokens = logits.shape[1]
    options = torch.tensor(
        [
            (
                spec.temperature,
                spec.temperature * math.log(spec.min_p) if spec.min_p > 0.0 else -math.inf,
                spec.top_k or num_tokens,
                spec.top_p,
                uniform(seed=spec.seed, output_index=spec.output_index, choice_index=spec.choice_index),
            )
            for spec in specs
        ],
        dtype=torch.float64,
    )
    temperature, least, top_k, top_p, number = to_device(options, logits.device).unsqueeze(2).unbind(1)  # each [num_rows, 1]

    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    highest = ordered[:, :1].double()
    is_kept = (ordered >= (highest + least).float()) & (torch.arange(num_tokens, device=logits.device) < top_k)
    cumulative = ((ordered.double() - highest) / temperature).exp().where(is_kept, 0.0).cumsum(1)
    total = cumulative[:, -1:]
    head = _num(cumulative < top_p * total).clamp(max=num_tokens - 1)
    place = _num(cumulative <= number * cumulative.gather(1, head))
    last = _num(cumulative < total)  # with any probability
    return ids.gather(1, torch.minimum(place, last)).squeeze(1)


def _num(is_true: Tensor) -> Tensor:
    """How many there are in each row, [num_rows, 1]."""
    return is_true.sum(1, keepdim=True)


def _logprobs(logits: Tensor, token_ids: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]) -> tuple[Tensor, ...]:
    """Of these rows: the token's own [num_rows]; ids and logprobs of as many of the most likely as any of them wants."""
    places = to_device(torch.tensor(rows), logits.device)
    own_logits = logits[places]
    wide = own_logits.double()
    totals = wide.logsumexp(1, keepdim=True)
    own = wide.gather(1, token_ids[places].unsqueeze(1)) - totals
    count = max(specs[row].num_logprobs or 0 for row in rows)
    if count == 0:
        return own.squeeze(1), token_ids.new_empty(len(rows), 0), wide.new_empty(len(rows), 0)
    top_ids = own_logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return own.squeeze(1), top_ids, wide.gather(1, top_ids) - totals


def _portions(rows: Sequence[int]) -> Sequence[Sequence[int]]:
    return [rows[start : start + _ROWS_AT_ONCE] for start in range(0, len(rows), _ROWS_AT_ONCE)]
