"""Which prompt tokens are computed in the next step: first come, first served, in chunks, up to so many tokens and prompts.

Decides only; pages, hand-offs and leases are the phase's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prefill_worker.prefill_sequence import PrefillSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """``num_tokens`` more tokens of one prompt, at least one."""

    sequence: PrefillSequence
    num_tokens: int


class PrefillScheduler:
    """Prompts in order of arrival. Several share a step; what does not fit into one is cut, at whatever token.

    What the prompts of a step have in the cache before it, computed or found there, is at most ``max_num_earlier`` tokens where
    there are several: all of it is attended to, which takes memory.
    """

    def __init__(self, *, max_num_batched_tokens: int, max_num_seqs: int, max_num_earlier: int) -> None:
        assert max_num_batched_tokens >= 1
        assert max_num_seqs >= 1
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_num_earlier = max_num_earlier
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

    def choose(
        self,
        take_pages: Callable[[PrefillSequence], bool],
        is_coming: Callable[[PrefillSequence, Sequence[PrefillSequence]], bool],
    ) -> list[Chunk]:
        """The next step's chunks. ``take_pages`` gives a prompt its pages, or says that they are not to be had now.
        ``is_coming`` says that one of those that have started will compute what the prompt would begin with: then it waits.

        A prompt that lacks pages holds up those behind it, so that none is overtaken for ever. Only prompts on the local path
        pass: their pages are reserved already, and to wait would keep just those pages from coming free. Who waits for what is
        coming holds up nobody: each step brings it nearer.
        """
        step = _Step(num_tokens=self._max_num_batched_tokens, num_seqs=self._max_num_seqs, num_earlier=self._max_num_earlier)
        for sequence in self._started:
            if not step.add(sequence):
                return step.chunks
        is_held_up = False
        for sequence in tuple(self._waiting):
            if step.is_full:
                break
            if is_held_up and not sequence.is_local:
                continue
            if is_coming(sequence, self._started):
                continue
            if not take_pages(sequence):
                is_held_up = True
                continue
            self._waiting.remove(sequence)
            self._started.append(sequence)
            if not step.add(sequence):
                break
        return step.chunks


@dataclass(slots=True, kw_only=True)
class _Step:
    """A step that is being filled, with the room that is left."""

    num_tokens: int
    num_seqs: int
    num_earlier: int
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.num_tokens == 0 or self.num_seqs == 0

    def add(self, sequence: PrefillSequence) -> bool:
        """Take in as much of the prompt as there is room for. False when there is none; the first prompt always has some."""
        if self.is_full or (self.chunks and sequence.num_computed > self.num_earlier):
            return False
        num_tokens = min(self.num_tokens, sequence.num_remaining)
        self.chunks.append(Chunk(sequence=sequence, num_tokens=num_tokens))
        self.num_tokens -= num_tokens
        self.num_seqs -= 1
        self.num_earlier -= sequence.num_computed
        return True
