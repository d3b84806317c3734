"""What a request's options change in one row of logits before a token is chosen: penalties, then biases, then bans.

A function of the row and its ``SampleSpec`` alone. Only the named tokens' logits change, each computed in double precision.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llm_engine.step_plan import Penalties, SampleSpec
from serving_core.sampling_params import BANNING_BIAS

Logits = npt.NDArray[np.float32]  # [vocab_size]
Ids = npt.NDArray[np.int64]

_LARGEST = float(np.finfo(np.float32).max)


def apply_logit_rules(logits: Logits, spec: SampleSpec) -> Logits:
    """The logits [vocab_size] to choose from; ``logits`` itself stays as it is. A token that is ruled out has -inf.

    Ids beyond the vocabulary are passed over: the router refuses them by name, and a row must not fail for others.
    """
    if spec.penalties is None and not spec.logit_bias and not spec.banned_token_ids:
        return logits
    changed = logits.copy()
    if spec.penalties is not None:
        _penalise(changed, spec.penalties)
    if spec.logit_bias:
        _add_bias(changed, spec.logit_bias)
    changed[_ids_within(np.array(spec.banned_token_ids, dtype=np.int64), len(logits))] = -np.inf
    return changed


def _penalise(logits: Logits, penalties: Penalties) -> None:
    output_ids = _ids_within(penalties.output_token_ids.numpy(), len(logits))
    if penalties.repetition != 1.0:
        seen = np.union1d(_ids_within(penalties.prompt_token_ids.numpy(), len(logits)), output_ids)
        wide = logits[seen].astype(np.float64)
        _put(logits, seen, np.where(wide > 0.0, wide / penalties.repetition, wide * penalties.repetition))
    if penalties.presence != 0.0 or penalties.frequency != 0.0:
        said, counts = np.unique(output_ids, return_counts=True)
        _put(logits, said, logits[said].astype(np.float64) - penalties.presence - penalties.frequency * counts)


def _add_bias(logits: Logits, logit_bias: tuple[tuple[int, float], ...]) -> None:
    within = [(token_id, bias) for token_id, bias in logit_bias if token_id < len(logits)]
    ids = np.array([token_id for token_id, _ in within], dtype=np.int64)
    biases = np.array([bias for _, bias in within], dtype=np.float64)
    _put(logits, ids, logits[ids].astype(np.float64) + biases)
    logits[ids[biases <= BANNING_BIAS]] = -np.inf


def _put(logits: Logits, ids: Ids, values: npt.NDArray[np.float64]) -> None:
    logits[ids] = np.clip(values, -_LARGEST, _LARGEST)


def _ids_within(token_ids: npt.NDArray[np.integer], vocab_size: int) -> Ids:
    return token_ids[token_ids < vocab_size].astype(np.int64, copy=False)
