"""When a sequence ends by its tokens, and which tokens may not be chosen yet. Both phases ask here, so that they agree.

Text rules (stop strings) are the router's and unknown here.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.step_plan import SampleSpec
from serving_core.generate_request import GenerateRequest
from serving_core.token_event import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """The rules that depend on the worker: the model's end tokens, and ``max_model_len`` for prompt and answer together."""

    eos_token_ids: frozenset[int]
    max_model_len: int

    def finish_reason(self, request: GenerateRequest, output_index: int, token_id: int) -> FinishReason | None:
        """How ``token_id`` at place ``output_index`` of the answer ends the sequence, or None when it goes on."""
        if output_index >= request.sampling.min_tokens and token_id in self._end_token_ids(request):
            return FinishReason.STOP
        num_output_tokens = output_index + 1
        if num_output_tokens >= request.sampling.max_tokens:
            return FinishReason.LENGTH
        if request.num_prompt_tokens + num_output_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def sample_spec(self, request: GenerateRequest, output_index: int) -> SampleSpec:
        """How to choose the token at place ``output_index``: a function of the request and the place alone."""
        sampling = request.sampling
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
        )

    def max_total_tokens(self, request: GenerateRequest) -> int:
        """Prompt and answer at their longest under these rules: what the worst case must hold."""
        return min(request.max_total_tokens, self.max_model_len)

    def _end_token_ids(self, request: GenerateRequest) -> frozenset[int]:
        stop_token_ids = frozenset(request.sampling.stop_token_ids)
        return stop_token_ids if request.sampling.ignore_eos else stop_token_ids | self.eos_token_ids
