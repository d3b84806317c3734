"""Chooses the tokens of a step's rows with one call of the native kernel: what ``sampler.sample`` says of each row."""

from __future__ import annotations

import itertools
import math
import struct
from array import array
from collections.abc import Sequence

from torch import Tensor

from llm_engine.native.library import NativeLibrary
from llm_engine.philox import uniform
from llm_engine.sampler import Choice, UnusableLogits
from llm_engine.step_plan import Penalties, SampledToken, SampleSpec
from serving_core.sampling_params import BANNING_BIAS
from serving_core.token_event import TokenLogprobs

_ROW = struct.Struct("=8d8q")
_FAILURES = {-1: UnusableLogits.not_finite, -2: UnusableLogits.all_banned}
_NO_PENALTIES = Penalties(repetition=1.0, presence=0.0, frequency=0.0)


class NativeSampler:
    """See ``Sampler``. Where a sum rounds differently a draw may too; all else is equal to the last bit."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def choose(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[Choice]:
        rows, ids, biases = [], [], []
        num_ids = num_biases = 0
        for spec in specs:
            penalties = spec.penalties or _NO_PENALTIES
            named = array("i", [token_id for token_id, _ in spec.logit_bias])
            named.extend(spec.banned_token_ids)
            rows.append(_packed_row(spec, penalties, num_ids, num_biases))
            ids += [penalties.prompt_token_ids.data, penalties.output_token_ids.data, named.tobytes()]
            biases += [bias for _, bias in spec.logit_bias]
            num_ids += len(penalties.prompt_token_ids) + len(penalties.output_token_ids) + len(named)
            num_biases = len(biases)
        max_top = max((spec.num_logprobs or 0 for spec in specs), default=0)
        tokens, logprobs, top_ids, top_logprobs = self._library.sample(
            logits,
            rows=b"".join(rows),
            ids=b"".join(ids),
            biases=array("d", biases).tobytes(),
            max_top=max_top,
        )
        choices: list[Choice] = []
        for index, (spec, token_id) in enumerate(zip(specs, tokens.tolist(), strict=True)):
            if token_id < 0:
                choices.append(_FAILURES[token_id]())
            elif spec.num_logprobs is None:
                choices.append(SampledToken(token_id=token_id))
            else:
                num_top = min(spec.num_logprobs, logits.shape[1])
                top = itertools.islice(zip(top_ids[index].tolist(), top_logprobs[index].tolist(), strict=True), num_top)
                of_token = TokenLogprobs(logprob=logprobs[index].item(), top=tuple(top))
                choices.append(SampledToken(token_id=token_id, logprobs=of_token))
        return choices


def _packed_row(spec: SampleSpec, penalties: Penalties, first_id: int, first_bias: int) -> bytes:
    """``Row`` of ``sampling.cpp``."""
    is_drawn = spec.temperature > 0.0
    return _ROW.pack(
        spec.temperature,
        spec.top_p,
        spec.temperature * math.log(spec.min_p) if spec.min_p > 0.0 else -math.inf,
        uniform(seed=spec.seed, output_index=spec.output_index, choice_index=spec.choice_index) if is_drawn else 0.0,
        penalties.repetition,
        penalties.presence,
        penalties.frequency,
        BANNING_BIAS,
        spec.top_k,
        -1 if spec.num_logprobs is None else spec.num_logprobs,
        first_id,
        len(penalties.prompt_token_ids),
        len(penalties.output_token_ids),
        len(spec.logit_bias),
        len(spec.banned_token_ids),
        first_bias,
    )
