"""An engine for tests: a model, its cache, and sequences that are fed by hand in steps of any shape."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from llm_engine.kv_cache import KVCache
from llm_engine.load_model import load_model
from llm_engine.model_runner import ModelRunner
from llm_engine.native.library import load_library
from llm_engine.phase import finished
from llm_engine.step_plan import PlanRow, SampledToken, SampleSpec, StepPlan, StepResult
from serving_core.engine_config import Quantization
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName

PAGE_SIZE = 16


def skip_without_kernels() -> None:
    """For tests of the native kernels: not every processor runs them."""
    if load_library() is None:
        pytest.skip("the native kernels do not run here")


def greedy_spec(*, output_index: int = 0) -> SampleSpec:
    """Greedy, with twenty logprobs: equal logprobs mean equal logits, as far as twenty tokens tell."""
    return SampleSpec(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice_index=0, output_index=output_index, num_logprobs=20)


@dataclass
class FedSequence:
    """A sequence in the cache, as far as it was fed."""

    key: SequenceKey
    page_ids: tuple[PageId, ...]
    num_fed: int = 0
    results: list[SampledToken] = field(default_factory=list)


class TinyEngine:
    """Loads ``path`` and hands out pages from the top of a pool that is never refilled. The cache is of ``dtype`` unless told
    otherwise."""

    def __init__(
        self,
        path: Path,
        dtype: KVDType,
        *,
        num_pages: int = 256,
        cache_dtype: KVDType | None = None,
        prefill: Quantization = Quantization.NONE,
        decode: Quantization = Quantization.AUTO,
        eager_phases: Collection[PhaseName] = (),
        max_recorded_rows: int = 0,
    ) -> None:
        quantizations = {PhaseName.PREFILL: prefill, PhaseName.DECODE: decode}
        self.loaded = load_model(path, dtype=dtype, quantizations=quantizations, eager_phases=eager_phases)
        layout = self.loaded.config.page_layout(page_size=PAGE_SIZE, dtype=cache_dtype or dtype)
        self.cache = KVCache(layout, num_pages)
        self.runner = ModelRunner(self.loaded, self.cache, max_recorded_rows=max_recorded_rows)
        self._free = [PageId(page) for page in range(num_pages)]

    def new_sequence(self, max_tokens: int) -> FedSequence:
        num_pages = self.cache.layout.num_pages_for(max_tokens)
        pages = tuple(self._free.pop() for _ in range(num_pages))
        return FedSequence(key=SequenceKey(RequestId(f"r{pages[0]}")), page_ids=pages)

    def step(self, *fed: tuple[FedSequence, Sequence[int]], phase: PhaseName = PhaseName.PREFILL) -> StepResult:
        """One step of ``phase`` that feeds each sequence some tokens and samples after the last of them."""
        rows = []
        for sequence, token_ids in fed:
            num_keys = sequence.num_fed + len(token_ids)
            rows.append(
                PlanRow(
                    key=sequence.key,
                    token_ids=tuple(token_ids),
                    start_position=sequence.num_fed,
                    page_ids=sequence.page_ids[: self.cache.layout.num_pages_for(num_keys)],
                    sample=greedy_spec(),
                )
            )
            sequence.num_fed = num_keys
        result = finished(self.runner.run(StepPlan(phase=phase, rows=tuple(rows))))
        for (sequence, _), token in zip(fed, result.tokens, strict=True):
            if token is not None:
                sequence.results.append(token)
        return result

    def prefill(
        self, token_ids: Sequence[int], *, chunk: int, max_tokens: int, phase: PhaseName = PhaseName.PREFILL
    ) -> FedSequence:
        """A new sequence, fed ``chunk`` tokens a step, as ``phase`` computes them."""
        sequence = self.new_sequence(max_tokens)
        for first in range(0, len(token_ids), chunk):
            self.step((sequence, token_ids[first : first + chunk]), phase=phase)
        return sequence

    def stored(self, sequence: FedSequence) -> torch.Tensor:
        """The sequence's keys and values, in the pages that are entered: [num_pages, num_layers, 2, page_size, num_kv_heads,
        head_dim]."""
        num_pages = self.cache.layout.num_pages_for(sequence.num_fed)
        return numbers_of(self.cache, sequence.page_ids[:num_pages])


def numbers_of(cache: KVCache, page_ids: Sequence[PageId]) -> torch.Tensor:
    """What the pages hold, multiplied by its scales where it has some: [num_pages, num_layers, 2, page_size, num_kv_heads,
    head_dim]."""
    numbers = cache.tensor[list(page_ids)]
    return numbers if cache.scales is None else numbers * cache.scales[list(page_ids)].unsqueeze(-1)
