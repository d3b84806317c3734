"""When a sequence ends by its tokens, and which tokens may not be chosen yet. Both phases ask here, so that they agree.

Text rules (stop strings) are the router's and unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm_engine.step_plan import Penalties, SampleSpec
from serving_core.generate_request import GenerateRequest
from serving_core.token_event import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """The rules that depend on the worker: the model's end tokens, and ``max_model_len`` for prompt and answer together."""

    eos_token_ids: frozenset[int]
    max_model_len: int

    def finish_reason(self, request: GenerateRequest, output_index: int, token_id: int) -> FinishReason | None:
        """How ``token_id`` at place ``output_index`` of the answer ends the sequence, or None when it goes on.

        A token of the request's log ends nothing: whoever sampled it asked already, and the sequence went on.
        """
        if output_index < len(request.output_token_ids):
            return None
        if output_index >= request.sampling.min_tokens and token_id in self._end_token_ids(request):
            return FinishReason.STOP
        num_output_tokens = output_index + 1
        if num_output_tokens >= request.sampling.max_tokens:
            return FinishReason.LENGTH
        if request.num_prompt_tokens + num_output_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def sample_spec(self, request: GenerateRequest, output_token_ids: Sequence[int]) -> SampleSpec:
        """How to choose the token that follows ``output_token_ids`` in the answer: a function of these two alone."""
        sampling = request.sampling
        output_index = len(output_token_ids)
        is_end_banned = output_index < sampling.min_tokens
        return SampleSpec(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            choice_index=request.key.choice_index,
            output_index=output_index,
            banned_token_ids=tuple(sorted(self._end_token_ids(request))) if is_end_banned else (),
            num_logprobs=sampling.num_logprobs,
            min_p=sampling.min_p,
            penalties=_penalties(request, output_token_ids),
            logit_bias=sampling.logit_bias,
        )

    def max_total_tokens(self, request: GenerateRequest) -> int:
        """Prompt and answer at their longest under these rules: what the worst case must hold."""
        return min(request.max_total_tokens, self.max_model_len)

    def _end_token_ids(self, request: GenerateRequest) -> frozenset[int]:
        stop_token_ids = frozenset(request.sampling.stop_token_ids)
        return stop_token_ids if request.sampling.ignore_eos else stop_token_ids | self.eos_token_ids


def _penalties(request: GenerateRequest, output_token_ids: Sequence[int]) -> Penalties | None:
    sampling = request.sampling
    if sampling.repetition_penalty == 1.0 and sampling.presence_penalty == 0.0 and sampling.frequency_penalty == 0.0:
        return None
    return Penalties(
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=tuple(output_token_ids),
    )
