"""Which prompt tokens are computed in the next step: first come, first served, in chunks, up to so many tokens and prompts.

Decides only; pages, hand-offs and leases are the phase's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefill_worker.prefill_sequence import PrefillSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """``num_tokens`` more tokens of one prompt, at least one."""

    sequence: PrefillSequence
    num_tokens: int


class PrefillScheduler:
    """Prompts in order of arrival. Several share a step; what does not fit into one is cut, at whatever token."""

    def __init__(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        assert max_num_batched_tokens >= 1
        assert max_num_seqs >= 1
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._started: list[PrefillSequence] = []
        self._waiting: list[PrefillSequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PrefillSequence]:
        yield from (*self._started, *self._waiting)

    def enqueue(self, sequence: PrefillSequence) -> None:
        """Add a prompt that needs pages before it can start."""
        self._waiting.append(sequence)

    def resume(self, sequence: PrefillSequence) -> None:
        """Add a prompt that holds its pages already."""
        self._started.append(sequence)

    def remove(self, sequence: PrefillSequence) -> None:
        """Idempotent."""
        self._started = [other for other in self._started if other is not sequence]
        self._waiting = [other for other in self._waiting if other is not sequence]

    def choose(self, take_pages: Callable[[PrefillSequence], bool]) -> list[Chunk]:
        """The next step's chunks. ``take_pages`` gives a prompt its pages, or says that they are not to be had now.

        A prompt that lacks pages holds up those behind it, so that none is overtaken for ever. Only prompts on the local path
        pass: their pages are reserved already, and to wait would keep just those pages from coming free.
        """
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        for sequence in self._started:
            if budget == 0 or len(chunks) == self._max_num_seqs:
                return chunks
            chunks.append(Chunk(sequence=sequence, num_tokens=min(budget, sequence.num_remaining)))
            budget -= chunks[-1].num_tokens
        is_held_up = False
        for sequence in tuple(self._waiting):
            if budget == 0 or len(chunks) == self._max_num_seqs:
                return chunks
            if is_held_up and not sequence.is_local:
                continue
            if not take_pages(sequence):
                is_held_up = True
                continue
            self._waiting.remove(sequence)
            self._started.append(sequence)
            chunks.append(Chunk(sequence=sequence, num_tokens=min(budget, sequence.num_remaining)))
            budget -= chunks[-1].num_tokens
        return chunks
