"""The run as a picture. Needs matplotlib, which comes with the extra ``bench``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engines.figures import Figures
from benchmarks.engines.run import Run
from benchmarks.engines.workload import STEP_BATCH, Workload

_Measure = Callable[[Figures, int], float | None]


def draw(run: Run, workload: Workload, path: Path) -> None:
    """One panel each for decode, prefill and step time: lines of medians, bars from lowest to highest. Raises ImportError
    without matplotlib."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(15, 4.5), layout="constrained")
    decode, prefill, steps = picture.subplots(1, 3)
    _panel(decode, run, workload.batches, Figures.decode_tokens_per_s)
    decode.set(title=f"Decode, context {workload.context}", xlabel="sequences at once", ylabel="tokens a second")
    _panel(prefill, run, workload.lengths, Figures.prefill_tokens_per_s)
    prefill.set(title="Prefill", xlabel="tokens of the prompt", ylabel="tokens a second")
    _panel(steps, run, workload.contexts, Figures.step_s)
    steps.set(title=f"Step, {STEP_BATCH} sequences", xlabel="tokens of context", ylabel="seconds")
    picture.suptitle(f"{run.model}, {workload.num_threads} threads, {run.commit}")
    picture.savefig(path, dpi=120)


def _at(size: int, measure: _Measure, figures: Figures) -> float | None:
    return measure(figures, size)


def _panel(axes: Any, run: Run, sizes: Sequence[int], measure: _Measure) -> None:
    for arm in run.arms:
        points = [(size, spread) for size in sizes if (spread := run.spread(arm, partial(_at, size, measure)))]
        if points:
            middle = [spread.median for _, spread in points]
            below = [spread.median - spread.low for _, spread in points]
            above = [spread.high - spread.median for _, spread in points]
            axes.errorbar([size for size, _ in points], middle, yerr=[below, above], marker="o", capsize=3, label=arm)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if axes.has_data():
        axes.legend()
