"""What a request's options change in one row of logits before a token is chosen: penalties, then biases, then bans.

A function of the row and its ``SampleSpec`` alone. Only the named tokens' logits change, each computed in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llm_engine.device import to_device
from llm_engine.step_plan import SampleSpec
from serving_core.sampling_params import BANNING_BIAS

Logits = npt.NDArray[np.float32]  # [vocab_size]
Ids = npt.NDArray[np.int64]

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LogitChanges:
    """What becomes of the logits of the tokens ``ids``, int64 [num_ids]. ``numbers``, float64 [4, num_ids], has for each its
    repetition penalty, presence penalty, frequency penalty times occurrences, and bias, which is -inf where it is ruled out."""

    ids: Tensor
    numbers: Tensor

    @classmethod
    def of(cls, spec: SampleSpec, vocab_size: int) -> LogitChanges | None:
        """In host memory, ids in rising order. None when nothing changes.

        Ids beyond the vocabulary are passed over: the router refuses them by name, and a row must not fail for others.
        """
        penalties = spec.penalties
        if penalties is None and not spec.logit_bias and not spec.banned_token_ids:
            return None
        seen = said = counts = np.zeros(0, np.int64)
        if penalties is not None:
            output_ids = _ids_within(penalties.output_token_ids.numpy(), vocab_size)
            if penalties.repetition != 1.0:
                seen = np.union1d(_ids_within(penalties.prompt_token_ids.numpy(), vocab_size), output_ids)
            if penalties.presence != 0.0 or penalties.frequency != 0.0:
                said, counts = np.unique(output_ids, return_counts=True)
        biases = {token_id: -np.inf if bias <= BANNING_BIAS else bias for token_id, bias in spec.logit_bias}
        biases |= dict.fromkeys(spec.banned_token_ids, -np.inf)
        biased = _ids_within(np.array(sorted(biases), np.int64), vocab_size)

        ids = np.unique(np.concatenate([seen, said, biased]))
        numbers = np.zeros((4, len(ids)))
        numbers[0] = 1.0
        if penalties is not None:
            numbers[0, np.searchsorted(ids, seen)] = penalties.repetition
            numbers[1, np.searchsorted(ids, said)] = penalties.presence
            numbers[2, np.searchsorted(ids, said)] = penalties.frequency * counts
        numbers[3, np.searchsorted(ids, biased)] = [biases[token_id] for token_id in biased.tolist()]
        return cls(ids=torch.from_numpy(ids), numbers=torch.from_numpy(numbers))

    @classmethod
    def joined(cls, changes: Sequence[LogitChanges]) -> LogitChanges:
        """Those of several rows, one after another."""
        return cls(
            ids=torch.cat([change.ids for change in changes]), numbers=torch.cat([change.numbers for change in changes], 1)
        )

    def to(self, device: torch.device) -> LogitChanges:
        """The same on ``device``."""
        return LogitChanges(ids=to_device(self.ids, device), numbers=to_device(self.numbers, device))

    def applied_to(self, logits: Tensor) -> Tensor:
        """What the logits of ``ids``, float32 [num_ids], become. A token that is ruled out has -inf."""
        repetition, presence, frequency, bias = self.numbers
        wide = logits.double()
        logits = _rounded(torch.where(wide > 0.0, wide / repetition, wide * repetition))
        logits = _rounded(logits.double() - presence - frequency)
        return _rounded(logits.double() + bias).masked_fill(bias == -torch.inf, -torch.inf)


def apply_logit_rules(logits: Logits, spec: SampleSpec) -> Logits:
    """The logits [vocab_size] to choose from; ``logits`` itself stays as it is. A token that is ruled out has -inf."""
    changes = LogitChanges.of(spec, len(logits))
    if changes is None:
        return logits
    changed = logits.copy()
    ids = changes.ids.numpy()
    changed[ids] = changes.applied_to(torch.from_numpy(changed[ids])).numpy()
    return changed


def _rounded(wide: Tensor) -> Tensor:
    return wide.clamp(-_LARGEST, _LARGEST).float()


def _ids_within(token_ids: npt.NDArray[np.integer], vocab_size: int) -> Ids:
    return token_ids[token_ids < vocab_size].astype(np.int64, copy=False)
