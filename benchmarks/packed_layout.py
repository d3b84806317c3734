"""Measures what pages cost a decode step beside a packed layout, where each sequence's keys and values lie in one piece.

Packed is the same kernel over pages as large as the sequence. The other arm has pages of 16 tokens, scattered over a cache that
is much larger than what the processor itself caches. Both arms take turns step by step; a figure is the median of a round, and
the table has the median and the range over the rounds.

    .venv/bin/python -m benchmarks.packed_layout
    .venv/bin/python -m benchmarks.packed_layout --rounds 1 --steps 5 --contexts 16,128     # a trial
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.engines.machine import commit, processor
from benchmarks.engines.spread import Spread
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel, load_model
from llm_engine.model_runner import ModelRunner
from llm_engine.step_plan import PlanRow, SampleSpec, StepPlan
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from twinpool.model_source import DEFAULT_MODEL, find_model

PAGE_SIZE = 16
NUM_SPARE_PAGES = 2048  # 720 MiB of the default model
WORTHWHILE = 0.03
"""The share of a step from which on a second layout would be worth its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row of the table: milliseconds of a step, and which share of the paged step the packed one saves."""

    batch: int
    context: int
    paged_ms: Spread
    packed_ms: Spread
    saved: Spread

    @property
    def verdict(self) -> str:
        """Packed wins where every round says so, and the median by enough."""
        if self.saved.median > WORTHWHILE and self.saved.low > 0.0:
            return "packed"
        return "paged" if self.saved.median < -WORTHWHILE and self.saved.high < 0.0 else "equal"


class Arm:
    """Steps of a batch whose sequences have ``context`` keys each, the new token's among them."""

    def __init__(self, loaded: LoadedModel, cache: KVCache, page_ids: Sequence[PageId], *, batch: int, context: int) -> None:
        num_pages = cache.layout.num_pages_for(context)
        spec = SampleSpec(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice_index=0, output_index=0)
        rows = [
            PlanRow(
                key=SequenceKey(RequestId(str(number))),
                token_ids=(number + 1,),
                start_position=context - 1,
                page_ids=tuple(page_ids[number * num_pages : (number + 1) * num_pages]),
                sample=spec,
            )
            for number in range(batch)
        ]
        self._runner = ModelRunner(loaded, cache)
        self._plan = StepPlan(phase=PhaseName.DECODE, rows=tuple(rows))

    def step_s(self) -> float:
        begin = time.perf_counter()
        self._runner.run(self._plan)
        return time.perf_counter() - begin


def compare(
    loaded: LoadedModel, paged_cache: KVCache, *, batch: int, context: int, num_rounds: int, num_steps: int
) -> Comparison:
    """Both arms side by side."""
    packed_cache = _cache(loaded, page_size=context, num_pages=batch)
    scattered = [PageId(page) for page in range(paged_cache.num_pages)]
    random.Random(context).shuffle(scattered)
    paged = Arm(loaded, paged_cache, scattered, batch=batch, context=context)
    packed = Arm(loaded, packed_cache, [PageId(page) for page in range(batch)], batch=batch, context=context)
    for arm in (paged, packed):
        arm.step_s()
    rounds = [_round(paged, packed, num_steps) for _ in range(num_rounds)]
    return Comparison(
        batch=batch,
        context=context,
        paged_ms=_spread([1e3 * of_paged for of_paged, _ in rounds]),
        packed_ms=_spread([1e3 * of_packed for _, of_packed in rounds]),
        saved=_spread([1 - of_packed / of_paged for of_paged, of_packed in rounds]),
    )


def _round(paged: Arm, packed: Arm, num_steps: int) -> tuple[float, float]:
    times = [(paged.step_s(), packed.step_s()) for _ in range(num_steps)]
    return median(of_paged for of_paged, _ in times), median(of_packed for _, of_packed in times)


def _spread(values: list[float]) -> Spread:
    spread = Spread.of(values)
    assert spread is not None
    return spread


def _cache(loaded: LoadedModel, *, page_size: int, num_pages: int) -> KVCache:
    layout = loaded.config.page_layout(page_size=page_size, dtype=KVDType.BFLOAT16)
    cache = KVCache(layout, num_pages)
    cache.tensor.normal_(generator=torch.Generator().manual_seed(1))
    return cache


def make_report(comparisons: Sequence[Comparison], *, command: str, machine: str, setup: str, num_rounds: int) -> str:
    """Markdown, with where and how it was measured and what follows."""
    lines = [
        "# Pages beside a packed layout",
        "",
        f"- commit: {commit()}",
        f"- machine: {machine}",
        f"- command: `{command}`",
        f"- {setup}",
        "",
        f"One decode step. Median (lowest-highest) of {num_rounds} rounds, both layouts in turns. Saved is the share of the",
        f"paged step that the packed one saves; a side wins with more than {WORTHWHILE:.0%} in the median and in every round.",
        "",
        f"| sequences | context | pages of {PAGE_SIZE}, ms | packed, ms | saved % | wins |",
        "|---|---|---|---|---|---|",
    ]
    for row in comparisons:
        saved = Spread(median=100 * row.saved.median, low=100 * row.saved.low, high=100 * row.saved.high)
        times = f"{row.paged_ms.text(2)} | {row.packed_ms.text(2)}"
        lines.append(f"| {row.batch} | {row.context} | {times} | {saved.text(1)} | {row.verdict} |")
    wins = [row for row in comparisons if row.verdict == "packed"]
    places = ", ".join(f"{row.batch} x {row.context}" for row in wins)
    lines += ["", f"Packed wins at {places}." if wins else "Packed wins nowhere, so there is no such layout in the engine."]
    return "\n".join(lines) + "\n"


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="as for twinpool serve (default: %(default)s)")
    parser.add_argument("--batches", type=numbers, default=[1, 8], help="sequences in a step")
    parser.add_argument("--contexts", type=numbers, default=[16, 32, 64, 128, 256, 512], help="keys of each sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of each layout in a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, help="folder for packed_layout.md (default: print it)")
    flags = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.packed_layout", *sys.argv[1:]])

    torch.set_num_threads(flags.threads)
    model = find_model(flags.model)
    loaded = load_model(model.path, dtype=KVDType.BFLOAT16)
    decode = loaded.phases[PhaseName.DECODE]
    if decode.library is None:
        raise SystemExit("packed_layout measures the native kernels, and they do not run here")
    largest = max(flags.batches) * -(-max(flags.contexts) // PAGE_SIZE)
    paged_cache = _cache(loaded, page_size=PAGE_SIZE, num_pages=largest + NUM_SPARE_PAGES)
    comparisons = [
        compare(loaded, paged_cache, batch=batch, context=context, num_rounds=flags.rounds, num_steps=flags.steps)
        for batch in flags.batches
        for context in flags.contexts
    ]
    report = make_report(
        comparisons,
        command=command,
        machine=processor(os.cpu_count() or 1),
        setup=f"{model.name}, {decode.arithmetic}, {flags.threads} threads, torch {torch.__version__}",
        num_rounds=flags.rounds,
    )
    if flags.results is None:
        print(report, end="")
    else:
        flags.results.mkdir(parents=True, exist_ok=True)
        Path(flags.results, "packed_layout.md").write_text(report)


if __name__ == "__main__":
    main()
