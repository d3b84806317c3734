"""Our engine alone: model, runner and paged cache in one process, without Ray, HTTP or a scheduler."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.engines.arm import DecodeRun, run_arm
from benchmarks.engines.workload import Workload
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import load_model
from llm_engine.model_runner import ModelRunner
from llm_engine.phase import finished
from llm_engine.step_plan import PlanRow, SampleSpec, StepPlan
from serving_core.cpu_features import has_bfloat16
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName

PAGE_SIZE = 16
CHUNK = 512
"""Both as the server has them by default: tokens in a page, and prompt tokens in one prefill step."""


class OurEngine:
    """A worker's engine with both phases."""

    def __init__(self, workload: Workload) -> None:
        torch.set_num_threads(workload.num_threads)
        dtype = KVDType.BFLOAT16 if has_bfloat16() else KVDType.FLOAT32
        loaded = load_model(Path(workload.model_path), dtype=dtype)
        layout = loaded.config.page_layout(page_size=PAGE_SIZE, dtype=dtype)
        num_pages = layout.num_pages_for(workload.max_total_tokens) + workload.max_sequences  # each may end within a page
        self._cache = KVCache(layout, num_pages)
        self._runner = ModelRunner(loaded, self._cache, max_recorded_rows=workload.max_sequences)
        forms = ", ".join(f"{phase.value} {model.arithmetic}" for phase, model in loaded.phases.items())
        self.setup = f"torch {torch.__version__}, {forms}, cache {dtype.value}, prefill in chunks of {CHUNK}"
        gc.freeze()  # as a worker does: or Python would look through all of torch again and again

    def prefill(self, prompt: Sequence[int]) -> float:
        return self._prefill(prompt, self._sequence_pages(0, len(prompt)))[1]

    def decode(self, prompt: Sequence[int], *, batch: int, num_steps: int) -> DecodeRun:
        pages = [self._sequence_pages(number, len(prompt) + num_steps) for number in range(batch)]
        first_token, _ = self._prefill(prompt, pages[0])
        filled = self._cache.layout.num_pages_for(len(prompt))
        for copy in pages[1:]:
            self._cache.tensor[list(copy[:filled])] = self._cache.tensor[list(pages[0][:filled])]
        tokens = [first_token] * batch
        step_s, token_ids = [], [first_token]
        for position in range(len(prompt), len(prompt) + num_steps):
            begin = time.perf_counter()
            rows = [self._row(number, [token], position, pages[number], is_sampled=True) for number, token in enumerate(tokens)]
            tokens = self._step(PhaseName.DECODE, rows)
            step_s.append(time.perf_counter() - begin)
            token_ids.append(tokens[0])
        return DecodeRun(step_s=tuple(step_s), token_ids=tuple(token_ids))

    def _prefill(self, prompt: Sequence[int], page_ids: Sequence[PageId]) -> tuple[int, float]:
        """The first token, and the seconds to it."""
        begin = time.perf_counter()
        for start in range(0, len(prompt), CHUNK):
            chunk = prompt[start : start + CHUNK]
            row = self._row(0, chunk, start, page_ids, is_sampled=start + len(chunk) == len(prompt))
            tokens = self._step(PhaseName.PREFILL, [row])
        return tokens[0], time.perf_counter() - begin

    def _step(self, phase: PhaseName, rows: Sequence[PlanRow]) -> list[int]:
        """The tokens of the rows that sample."""
        result = finished(self._runner.run(StepPlan(phase=phase, rows=tuple(rows))))
        assert not result.failures, result.failures
        return [token.token_id for token in result.tokens if token is not None]

    def _row(
        self, number: int, token_ids: Sequence[int], start: int, page_ids: Sequence[PageId], *, is_sampled: bool
    ) -> PlanRow:
        spec = SampleSpec(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice_index=0, output_index=0)
        num_pages = self._cache.layout.num_pages_for(start + len(token_ids))
        return PlanRow(
            key=SequenceKey(RequestId(f"sequence-{number}")),
            token_ids=tuple(token_ids),
            start_position=start,
            page_ids=tuple(page_ids[:num_pages]),
            sample=spec if is_sampled else None,
        )

    def _sequence_pages(self, number: int, num_tokens: int) -> list[PageId]:
        num_pages = self._cache.layout.num_pages_for(num_tokens)
        first = number * num_pages
        assert first + num_pages <= self._cache.num_pages, "the cache holds every part of the workload"
        return [PageId(page) for page in range(first, first + num_pages)]


if __name__ == "__main__":
    run_arm(OurEngine)
