"""What one process of one arm measured, as a file that it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of every repetition at one size: a prompt's length, a batch or a context."""

    size: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """``prefill`` has one number a run, by length; ``decode`` one a step, by batch; ``steps`` one a step, by context.

    ``token_ids`` are the first greedy tokens after a fixed prompt, so that arms can be held against each other.
    ``peak_memory_bytes`` is resident memory of the process and its children, each at its highest. ``setup`` says versions and
    settings in words.
    """

    prefill: tuple[Timing, ...]
    decode: tuple[Timing, ...]
    steps: tuple[Timing, ...]
    token_ids: tuple[int, ...]
    peak_memory_bytes: int
    setup: str

    def prefill_tokens_per_s(self, length: int) -> float | None:
        """From the median run; None where it was not measured."""
        seconds = _find(self.prefill, length)
        return length / median(seconds) if seconds else None

    def decode_tokens_per_s(self, batch: int) -> float | None:
        """Over all steps together, since a client waits for slow ones too; None where it was not measured."""
        seconds = _find(self.decode, batch)
        return batch * len(seconds) / sum(seconds) if seconds else None

    def step_s(self, context: int) -> float | None:
        """The median step; None where it was not measured."""
        seconds = _find(self.steps, context)
        return median(seconds) if seconds else None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Figures:
        values: dict[str, Any] = json.loads(path.read_text())
        values |= {name: _timings(values[name]) for name in ("prefill", "decode", "steps")}
        values["token_ids"] = tuple(values["token_ids"])
        return cls(**values)


def _timings(entries: Iterable[dict[str, Any]]) -> tuple[Timing, ...]:
    return tuple(Timing(size=entry["size"], seconds=tuple(entry["seconds"])) for entry in entries)


def _find(timings: Iterable[Timing], size: int) -> tuple[float, ...]:
    return next((timing.seconds for timing in timings if timing.size == size), ())
