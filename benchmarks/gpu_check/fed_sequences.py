"""Sequences of random tokens in a cache, fed to forward passes step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llm_engine.cuda.device_steps import DeviceSteps
from llm_engine.device import to_host
from llm_engine.forward import Forward
from llm_engine.kv_cache import KVCache
from llm_engine.phase import StepUnderWay, finished
from llm_engine.step_plan import NOT_YET_KNOWN, PlanRow, SampleSpec, StepPlan, StepResult
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.worker_status import PhaseName

_GREEDY = SampleSpec(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice_index=0, output_index=0)
_DRAWN = replace(_GREEDY, temperature=0.8, top_p=0.95)


class FedSequences:
    """``token_ids`` are what is to be fed, sequence by sequence; their pages are scattered over the cache."""

    def __init__(self, cache: KVCache, token_ids: Sequence[Sequence[int]], *, num_tokens_each: int) -> None:
        self.token_ids = [list(ids) for ids in token_ids]
        self.num_fed = [0] * len(token_ids)
        num_pages = cache.layout.num_pages_for(num_tokens_each)
        assert len(token_ids) * num_pages <= cache.num_pages
        self._layout = cache.layout
        scattered = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        self._pages = [
            tuple(map(PageId, scattered[first : first + num_pages]))
            for first in range(0, len(token_ids) * num_pages, num_pages)
        ]

    @classmethod
    def random(cls, cache: KVCache, lengths: Sequence[int], *, num_tokens: int, num_tokens_each: int) -> FedSequences:
        """Of ``lengths`` tokens with ids below ``num_tokens``."""
        generator = torch.Generator().manual_seed(len(lengths))
        token_ids = [torch.randint(num_tokens, (length,), generator=generator).tolist() for length in lengths]
        return cls(cache, token_ids, num_tokens_each=num_tokens_each)

    @torch.inference_mode()
    def step(self, forward: Forward, indices: Sequence[int], num_tokens: Sequence[int] | None = None) -> Tensor:
        """Feed the next token of each of these sequences, or ``num_tokens`` of each. Returns their logits in host memory,
        float32 [len(indices), num_tokens]: a step ends when they are there."""
        rows = [self._row(index, 1 if num_tokens is None else num_tokens[place]) for place, index in enumerate(indices)]
        phase = PhaseName.DECODE if num_tokens is None else PhaseName.PREFILL
        logits = forward.logits(StepPlan(phase=phase, rows=tuple(rows)))
        assert logits is not None
        return to_host(logits)[: len(rows)]

    @torch.inference_mode()
    def decode(self, steps: DeviceSteps, indices: Sequence[int], num_steps: int, *, num_ahead: int) -> None:
        """Draw so many tokens for each of these sequences, whose next is the first to be fed, with ``num_ahead`` steps begun
        before the first of them is waited for."""
        under_way: deque[StepResult | StepUnderWay] = deque()
        for step in range(num_steps):
            rows = [self._row(index, 1) for index in indices]
            token = None if step == 0 else (NOT_YET_KNOWN,)
            plan = tuple(
                replace(row, token_ids=token or row.token_ids, sample=replace(_DRAWN, output_index=step)) for row in rows
            )
            under_way.append(steps.run(StepPlan(phase=PhaseName.DECODE, rows=plan)))
            if len(under_way) > num_ahead:
                finished(under_way.popleft())
        for outcome in under_way:
            finished(outcome)

    def _row(self, index: int, num_tokens: int) -> PlanRow:
        first = self.num_fed[index]
        self.num_fed[index] = end = first + num_tokens
        return PlanRow(
            key=SequenceKey(RequestId(str(index))),
            token_ids=tuple(self.token_ids[index][first:end]),
            start_position=first,
            page_ids=self._pages[index][: self._layout.num_pages_for(end)],
            sample=_GREEDY,
        )
