"""Which ids are tokens, which of them end a sequence, and which may not be chosen yet. Both phases ask here, and so agree.

Text rules (stop strings) are the router's and unknown here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llm_engine.packed_ids import PackedIds
from llm_engine.sample_template import SampleTemplate
from llm_engine.step_plan import Penalties, SampleSpec
from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.token_event import FinishReason
from serving_core.transfer_ticket import HandoffCommit


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """The rules that depend on the worker: the model's tokens, ids 0 to ``num_tokens`` - 1, those of them that end a sequence,
    and ``max_model_len`` for prompt and answer together."""

    eos_token_ids: frozenset[int]
    num_tokens: int
    max_model_len: int

    def check_token_ids(self, request: GenerateRequest) -> None:
        """Raises ``Refused`` (MALFORMED) unless every id in the request is a token of the model: computing another would fail
        the step for everybody in it."""
        sampling = request.sampling
        self._check_ids("prompt", request.prompt_token_ids)
        self._check_ids("log", request.output_token_ids)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias])

    def check_commit(self, commit: HandoffCommit) -> None:
        """Raises ``Refused`` (MALFORMED) unless the token handed over, and each named beside it, is one of the model."""
        self._check_ids("commit", (commit.token_id,))
        if commit.logprobs is not None:
            self._check_ids("commit's logprobs", [token_id for token_id, _ in commit.logprobs.top])

    def finish_reason(self, request: GenerateRequest, output_index: int, token_id: int) -> FinishReason | None:
        """How ``token_id`` at place ``output_index`` of the answer ends the sequence, or None when it goes on.

        A token of the request's log ends nothing: whoever sampled it asked already, and the sequence went on.
        """
        if output_index < len(request.output_token_ids):
            return None
        if output_index >= request.sampling.min_tokens and token_id in self._end_token_ids(request):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.is_last(request, output_index) else None

    def is_last(self, request: GenerateRequest, output_index: int) -> bool:
        """Whether the token at that place ends the sequence, whichever it is."""
        return request.num_prompt_tokens + output_index + 1 >= self.max_total_tokens(request)

    def sample_template(self, request: GenerateRequest) -> SampleTemplate:
        """How to choose each token of the request's answer."""
        sampling = request.sampling
        return SampleTemplate(
            first=SampleSpec(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                choice_index=request.key.choice_index,
                output_index=0,
                num_logprobs=sampling.num_logprobs,
                min_p=sampling.min_p,
                penalties=_penalties(request),
                logit_bias=sampling.logit_bias,
            ),
            end_token_ids=tuple(sorted(self._end_token_ids(request))),
            min_tokens=sampling.min_tokens,
        )

    def sample_spec(self, request: GenerateRequest, output_token_ids: Sequence[int]) -> SampleSpec:
        """How to choose the token that follows ``output_token_ids`` in the answer: a function of these two alone."""
        return self.sample_template(request).spec(output_token_ids)

    def max_total_tokens(self, request: GenerateRequest) -> int:
        """Prompt and answer at their longest under these rules: what the worst case must hold."""
        return min(request.max_total_tokens, self.max_model_len)

    def _check_ids(self, where: str, token_ids: Collection[int]) -> None:
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self.num_tokens:
            wrong = lowest if lowest < 0 else highest
            raise Refused(RefusalCode.MALFORMED, f"Token id {wrong} in the {where} must be from 0 to {self.num_tokens - 1}.")

    def _end_token_ids(self, request: GenerateRequest) -> frozenset[int]:
        stop_token_ids = frozenset(request.sampling.stop_token_ids)
        return stop_token_ids if request.sampling.ignore_eos else stop_token_ids | self.eos_token_ids


def _penalties(request: GenerateRequest) -> Penalties | None:
    sampling = request.sampling
    if sampling.repetition_penalty == 1.0 and sampling.presence_penalty == 0.0 and sampling.frequency_penalty == 0.0:
        return None
    return Penalties(
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        prompt_token_ids=PackedIds.of(request.prompt_token_ids),
    )
