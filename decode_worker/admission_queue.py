"""Who gets pages next on the decode side: a short list in order of arrival. Knows neither pages nor leases."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from decode_worker.decode_sequence import DecodeSequence


class AdmissionQueue:
    """Sequences that wait for pages. Only the head is ever granted, so that a small request never overtakes a large one.

    Sequences that come back with a log arrived before those that have none, wherever that was, and stand before them; either
    kind in order of arrival. At most ``max_waiting`` of each kind may wait. Those with a log cannot keep the others out for
    long: while one of the others is at the head of its kind, no new sequence begins, and each that has begun ends.
    """

    def __init__(self, max_waiting: int) -> None:
        assert max_waiting >= 0
        self._max_waiting = max_waiting
        self._waiting: list[DecodeSequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[DecodeSequence]:
        return iter(tuple(self._waiting))

    def is_overfull(self, sequence: DecodeSequence) -> bool:
        """Whether ``sequence``, the last of its kind, has to be turned away if it still waits."""
        num_of_kind = sum(waiting.has_log == sequence.has_log for waiting in self._waiting)
        return num_of_kind > self._max_waiting

    def append(self, sequence: DecodeSequence) -> None:
        place = len(self._waiting)
        if sequence.has_log:
            place = next((index for index, waiting in enumerate(self._waiting) if not waiting.has_log), place)
        self._waiting.insert(place, sequence)

    def remove(self, sequence: DecodeSequence) -> None:
        """Idempotent: whoever left already is not missed."""
        self._waiting = [waiting for waiting in self._waiting if waiting is not sequence]

    def next_to_grant(self, is_room_for: Callable[[DecodeSequence], bool]) -> DecodeSequence | None:
        """The head if there is room for it, taken off the list; None when there is none or nobody waits."""
        if not self._waiting or not is_room_for(self._waiting[0]):
            return None
        return self._waiting.pop(0)
