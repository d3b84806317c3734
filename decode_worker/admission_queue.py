"""Who gets pages next on the decode side: a short list in order of arrival. Knows neither pages nor leases."""

from __future__ import annotations

from collections.abc import Iterator

from decode_worker.decode_sequence import DecodeSequence


class AdmissionQueue:
    """Sequences that wait for pages, at most ``max_waiting`` of them. Only the head is ever granted, so that a small request
    never overtakes a large one."""

    def __init__(self, max_waiting: int) -> None:
        assert max_waiting >= 0
        self._max_waiting = max_waiting
        self._waiting: list[DecodeSequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[DecodeSequence]:
        return iter(tuple(self._waiting))

    @property
    def is_overfull(self) -> bool:
        """More wait than may: the last one has to be turned away."""
        return len(self._waiting) > self._max_waiting

    def append(self, sequence: DecodeSequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: DecodeSequence) -> None:
        """Idempotent: whoever left already is not missed."""
        self._waiting = [waiting for waiting in self._waiting if waiting is not sequence]

    def next_to_grant(self, *, num_free_pages: int, num_free_seats: int) -> DecodeSequence | None:
        """The head if it fits, taken off the list; None when it does not or nobody waits."""
        if not self._waiting or num_free_seats < 1 or self._waiting[0].num_pages > num_free_pages:
            return None
        return self._waiting.pop(0)
