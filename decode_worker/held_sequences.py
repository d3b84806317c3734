"""Every sequence that one decode phase holds, and the one way out for each: what it held goes back, once, from whatever state.

Knows no segment and no step.
"""

from __future__ import annotations

from collections.abc import Iterator

from decode_worker.admission_queue import AdmissionQueue
from decode_worker.decode_sequence import DecodeSequence, DecodeState
from decode_worker.prompt_prefix import PromptPrefix
from decode_worker.reservation_desk import ReservationDesk
from decode_worker.seats import Seats
from llm_engine.page_pool import PagePool
from llm_engine.phase_counters import PhaseCounters
from serving_core.clock import Clock
from serving_core.errors import RefusalCode, Refused
from serving_core.event_outbox import EventOutbox
from serving_core.ids import SequenceKey
from serving_core.lease_table import LeaseTable
from serving_core.token_event import FailureKind, SequenceEvicted, SequenceFailed


class HeldSequences:
    """A sequence is in the waiting list or has a seat, and has a lease in either case."""

    def __init__(
        self,
        *,
        pool: PagePool,
        desk: ReservationDesk,
        prefix: PromptPrefix,
        queue: AdmissionQueue,
        seats: Seats,
        leases: LeaseTable,
        outbox: EventOutbox,
        counters: PhaseCounters,
        clock: Clock,
    ) -> None:
        self.queue = queue
        self.seats = seats
        self._pool = pool
        self._desk = desk
        self._prefix = prefix
        self._leases = leases
        self._outbox = outbox
        self._counters = counters
        self._clock = clock
        self._sequences: dict[SequenceKey, DecodeSequence] = {}

    def get(self, key: SequenceKey) -> DecodeSequence | None:
        return self._sequences.get(key)

    def __getitem__(self, key: SequenceKey) -> DecodeSequence:
        return self._sequences[key]

    def add(self, sequence: DecodeSequence) -> None:
        """Hold a new sequence: in the waiting list, with a lease."""
        self._sequences[sequence.key] = sequence
        self.queue.append(sequence)
        self.grant_lease(sequence)

    def grant_lease(self, sequence: DecodeSequence) -> None:
        self._leases.grant(sequence.key, self._clock.now())

    def expired(self, now: float) -> Iterator[DecodeSequence]:
        """Those whose lease ended; still held."""
        for key in self._leases.expired(now):
            yield self._sequences[key]

    def evict(self, sequence: DecodeSequence) -> None:
        """Make room for an older one; the router may come back for another attempt."""
        self._counters.num_preemptions += 1
        self._outbox.put(sequence.router_id, SequenceEvicted(key=sequence.key, attempt=sequence.attempt))
        message = f"{sequence.key} attempt {sequence.attempt} was evicted, since an older sequence needed its pages."
        self.end(sequence, RefusalCode.UNKNOWN_RESERVATION, message)

    def fail(self, sequence: DecodeSequence, kind: FailureKind, code: RefusalCode, message: str) -> None:
        """End the sequence and tell its router why."""
        failed = SequenceFailed(key=sequence.key, attempt=sequence.attempt, kind=kind, message=message)
        self._outbox.put(sequence.router_id, failed)
        self.end(sequence, code, message)
        if kind is FailureKind.INTERNAL:
            self._prefix.distrust(sequence)

    def end(self, sequence: DecodeSequence, code: RefusalCode, message: str, *, fence: int = 0) -> None:
        """Release all that the sequence holds and remember for one lease how it ended. Attempts up to ``fence`` end with it."""
        if sequence.state is DecodeState.ENDED:
            return
        sequence.answer_callers(Refused(code, message))
        self._desk.remember_end(sequence, code, message, fence=fence)
        self.drop(sequence)

    def drop(self, sequence: DecodeSequence) -> None:
        """The one place where pages, seat, lease and place in the list are given back. Idempotent."""
        if sequence.state is DecodeState.ENDED:
            return
        if sequence.state is DecodeState.DECODING:
            self._prefix.publish_all(sequence)
        sequence.state = DecodeState.ENDED
        self.queue.remove(sequence)
        self.seats.leave(sequence)
        self._leases.drop(sequence.key)
        del self._sequences[sequence.key]
        if sequence.reservation is not None:
            self._desk.close(sequence)
            self._pool.release(sequence.reservation.page_ids, sequence.owner)
