"""What every arm is asked to do, as a file that its process reads. Needs the standard library alone, as do all modules that an
arm in a peer's environment imports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEP_BATCH = 8
"""Sequences in a step whose time is taken by context length."""

COMPARED_PROMPT, NUM_COMPARED_TOKENS = 256, 32
"""Every arm answers a prompt of that length with that many tokens, to be held against each other."""

_LONG_ENOUGH = 2048
_MAX_PREFILL_RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The same for all arms of a run. Lengths and contexts are in tokens.

    ``model_path`` is the GGUF file, ``folder_path`` a Hugging Face folder with the same weights in bfloat16. Every prompt is
    the head of ``text``, token ids of real text. Decode is taken by ``batches`` from ``context`` on over ``num_steps`` steps,
    prefill by ``lengths``, and the time of ``num_context_steps`` steps of ``STEP_BATCH`` sequences by ``contexts``. Each of
    the three may be empty.
    """

    model_path: str
    folder_path: str
    num_threads: int
    text: tuple[int, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    num_steps: int
    contexts: tuple[int, ...]
    num_context_steps: int

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that any part of it makes."""
        return max(tokens for _, tokens in self._parts())

    @property
    def max_total_tokens(self) -> int:
        """Tokens in the cache at once, at most."""
        return max(batch * tokens for batch, tokens in self._parts())

    @property
    def max_sequences(self) -> int:
        """Sequences at once, at most."""
        return max(batch for batch, _ in self._parts())

    def prompt(self, num_tokens: int) -> list[int]:
        """The head of the text, which starts again where it is too short."""
        return [self.text[index % len(self.text)] for index in range(num_tokens)]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Workload:
        stored = json.loads(path.read_text())
        values: dict[str, Any] = {name: tuple(own) if isinstance(own, list) else own for name, own in stored.items()}
        return cls(**values)

    def _parts(self) -> list[tuple[int, int]]:
        """Sequences of each part, and the tokens that each of them grows to."""
        return [
            (1, COMPARED_PROMPT + NUM_COMPARED_TOKENS),
            *((1, length) for length in self.lengths),
            *((batch, self.context + self.num_steps) for batch in self.batches),
            *((STEP_BATCH, context + self.num_context_steps) for context in self.contexts),
        ]


def num_prefill_runs(length: int) -> int:
    """How often a prompt of that length is computed in one process: short ones more often, since they are over soon."""
    return max(1, min(_MAX_PREFILL_RUNS, _LONG_ENOUGH // length))
