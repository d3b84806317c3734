"""transformers' ``generate`` in bfloat16, with its defaults."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.engines.arm import DecodeRun, run_arm
from benchmarks.engines.workload import Workload


class _Clock(BaseStreamer):
    """When the prompt, and then each step's tokens, were handed out."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class TransformersEngine:
    """The model in the Hugging Face folder."""

    def __init__(self, workload: Workload) -> None:
        torch.set_num_threads(workload.num_threads)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(workload.folder_path, dtype=torch.bfloat16)
        self._model = model.eval()
        self.setup = f"transformers {transformers.__version__}, torch {torch.__version__}, bfloat16, generate()"

    def prefill(self, prompt: Sequence[int]) -> float:
        begin = time.perf_counter()
        self._generate(prompt, batch=1, num_tokens=1, clock=_Clock())
        return time.perf_counter() - begin

    def decode(self, prompt: Sequence[int], *, batch: int, num_steps: int) -> DecodeRun:
        clock = _Clock()
        token_ids = self._generate(prompt, batch=batch, num_tokens=num_steps + 1, clock=clock)
        first = clock.times[1:]  # the first of all is the prompt's
        step_s = [end - begin for begin, end in pairwise(first)]
        return DecodeRun(step_s=tuple(step_s), token_ids=tuple(token_ids))

    def _generate(self, prompt: Sequence[int], *, batch: int, num_tokens: int, clock: _Clock) -> list[int]:
        inputs = torch.tensor([list(prompt)] * batch)
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            streamer=clock,
        )
        token_ids: list[int] = output[0, len(prompt) :].tolist()
        return token_ids


if __name__ == "__main__":
    run_arm(TransformersEngine)
