"""What all arms do alike, in a process of each arm's own: run the workload over an engine and leave the figures behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.engines.figures import Figures, Timing
from benchmarks.engines.peak_memory import peak_memory_bytes
from benchmarks.engines.workload import COMPARED_PROMPT, NUM_COMPARED_TOKENS, STEP_BATCH, Workload, num_prefill_runs

_NUM_WARM_UP_STEPS = 3
_WARMED_UP_LENGTH = 1024  # up to this, a prompt is computed once before the clock runs; longer ones do not feel the first time


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """Seconds of each step, and the greedy tokens of the first sequence from the one that prefill gave."""

    step_s: tuple[float, ...]
    token_ids: tuple[int, ...]


class Engine(Protocol):
    """One way to run the model. All decoding is greedy and never stops at an end token."""

    setup: str

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token."""

    def decode(self, prompt: Sequence[int], *, batch: int, num_steps: int) -> DecodeRun:
        """Decode ``batch`` sequences of the same prompt at once, each with keys and values of its own. What comes before the
        first of the steps is not in the times."""


def run_arm(make_engine: Callable[[Workload], Engine]) -> None:
    """The main function of an arm's module: ``python -m MODULE WORKLOAD_FILE FIGURES_FILE``."""
    workload_path, figures_path = map(Path, sys.argv[1:])
    workload = Workload.read(workload_path)
    measure(make_engine(workload), workload).write(figures_path)


def measure(engine: Engine, workload: Workload) -> Figures:
    """Do the whole workload once."""
    compared = engine.decode(workload.prompt(COMPARED_PROMPT), batch=1, num_steps=NUM_COMPARED_TOKENS - 1)
    prefill = [Timing(size=length, seconds=_prefill(engine, workload.prompt(length))) for length in workload.lengths]
    decode = [
        Timing(size=batch, seconds=_decode(engine, workload.prompt(workload.context), batch, workload.num_steps))
        for batch in workload.batches
    ]
    steps = [
        Timing(size=context, seconds=_decode(engine, workload.prompt(context), STEP_BATCH, workload.num_context_steps))
        for context in workload.contexts
    ]
    return Figures(
        prefill=tuple(prefill),
        decode=tuple(decode),
        steps=tuple(steps),
        token_ids=compared.token_ids,
        peak_memory_bytes=peak_memory_bytes(os.getpid()),
        setup=engine.setup,
    )


def _prefill(engine: Engine, prompt: Sequence[int]) -> tuple[float, ...]:
    if len(prompt) <= _WARMED_UP_LENGTH:
        engine.prefill(prompt)
    return tuple(engine.prefill(prompt) for _ in range(num_prefill_runs(len(prompt))))


def _decode(engine: Engine, prompt: Sequence[int], batch: int, num_steps: int) -> tuple[float, ...]:
    """The first steps warm up: a batch's buffers are made and its kernels chosen in them. The context is shorter by them."""
    shorter = prompt[: max(1, len(prompt) - _NUM_WARM_UP_STEPS)]
    run = engine.decode(shorter, batch=batch, num_steps=_NUM_WARM_UP_STEPS + num_steps)
    return run.step_s[_NUM_WARM_UP_STEPS:]
