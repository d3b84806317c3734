"""Decode: admission of handed-over sequences, continuous batching, token streams. Engine thread only; knows no gRPC.

Life of one sequence:
1. ``reserve``: its worst case is reserved, at once or in order of arrival; a ticket answers the caller.
2. ``accept`` copies checked segments into the pages (or ``lend_pages`` hands them to this worker's own prefill phase).
3. ``commit`` verifies that all arrived and takes token 0; from here on the hand-off has happened.
4. ``plan`` and ``apply`` add a token a step until a token rule ends it.
5. ``_end`` releases everything, once, from whatever state: ended, aborted, withdrawn, failed, or no router named it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from decode_worker.admission_check import AdmissionCheck
from decode_worker.admission_queue import AdmissionQueue
from decode_worker.commit_check import check_commit, require_token
from decode_worker.decode_sequence import DecodeSequence, DecodeState, Reservation, TicketAnswer
from decode_worker.reservation_desk import ReservationDesk
from kv_transfer.page_transport import Segment
from llm_engine.page_pool import PagePool
from llm_engine.phase import PhaseStatus
from llm_engine.phase_counters import PhaseCounters
from llm_engine.step_plan import PlanRow, StepPlan, StepResult
from llm_engine.token_rules import TokenRules
from serving_core.clock import Clock
from serving_core.errors import RefusalCode, Refused
from serving_core.event_outbox import EventOutbox
from serving_core.event_sink import EventSink
from serving_core.generate_request import GenerateRequest
from serving_core.ids import Incarnation, PageId, ReservationId, RouterId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVPageLayout
from serving_core.lease_table import LeaseTable
from serving_core.page_state import PageState
from serving_core.token_event import FailureKind, SequenceFailed, TokenEvent, TokenLogprobs
from serving_core.transfer_ticket import HandoffCommit, TransferTicket
from serving_core.worker_status import PhaseName


class KVWriter(Protocol):
    """Where segments go: this worker's paged cache."""

    def write(self, page_id: PageId, offset: int, payload: memoryview) -> None:
        """Copy ``payload`` into the page, ``offset`` bytes from its start."""


class DecodePhase:
    """The decode phase of one worker; implements ``Phase``, and ``LocalDecode`` of the prefill phase beside it.

    ``address`` is where prefill workers reach this worker. ``new_reservation_id`` makes ids never used before by any process.
    ``max_num_seqs`` bounds the sequences that hold pages, ``max_waiting`` those that wait for some.
    """

    name = PhaseName.DECODE

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        address: str,
        layout: KVPageLayout,
        pool: PagePool,
        cache: KVWriter,
        rules: TokenRules,
        sink: EventSink,
        clock: Clock,
        lease_s: float,
        max_num_seqs: int,
        new_reservation_id: Callable[[], ReservationId],
        max_waiting: int = 16,
    ) -> None:
        assert layout.page_size == pool.page_size
        assert max_num_seqs >= 1
        self.worker_id = worker_id
        self.counters = PhaseCounters()
        self._layout = layout
        self._pool = pool
        self._cache = cache
        self._rules = rules
        self._clock = clock
        self._max_num_seqs = max_num_seqs
        self._admission = AdmissionCheck(worker_id=worker_id, layout=layout, rules=rules, num_pages=pool.num_pages)
        self._desk = ReservationDesk(
            worker_id=worker_id,
            incarnation=incarnation,
            address=address,
            layout=layout,
            lease_s=lease_s,
            clock=clock,
            new_reservation_id=new_reservation_id,
        )
        self._outbox = EventOutbox(sink)
        self._leases = LeaseTable(lease_s)
        self._queue = AdmissionQueue(max_waiting)
        self._sequences: dict[SequenceKey, DecodeSequence] = {}
        self._decoding: dict[SequenceKey, DecodeSequence] = {}
        self._is_draining = False

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    # Reservation

    def reserve(self, request: GenerateRequest, attempt: int, router_id: RouterId, answer: TicketAnswer) -> None:
        """Promise pages for the sequence at its longest; ``answer`` is called with the ticket or a refusal, perhaps later.

        The same attempt again gets the same ticket. A higher one voids what was promised before: new generations, new ticket.
        """
        try:
            with self.counters.counting_refusals():
                ticket = self._reserve(request, attempt, router_id, answer)
        except Refused as refused:
            answer(refused)
            return
        if ticket is not None:
            answer(ticket)

    def withdraw(self, key: SequenceKey, attempt: int, answer: TicketAnswer) -> None:
        """Forget a caller of ``reserve`` that has gone, named by its ``answer``. When no other caller wants the ticket and
        nothing was sent for it, the reservation ends as if it had never been asked for."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.attempt != attempt or answer not in sequence.callers:
            return
        sequence.callers.remove(answer)
        is_untouched = sequence.reservation is None or not sequence.reservation.is_filling
        if not sequence.callers and is_untouched:
            self._drop(sequence)

    def _reserve(
        self, request: GenerateRequest, attempt: int, router_id: RouterId, answer: TicketAnswer
    ) -> TransferTicket | None:
        """The ticket if it is there already; else None, with ``answer`` kept for when it is."""
        if attempt < 1:
            raise Refused(RefusalCode.MALFORMED, f"Attempt {attempt} of {request.key} must be at least 1.")
        sequence = self._sequences.get(request.key)
        ended_attempt = self._desk.ended_attempt(request.key)
        newest = max(ended_attempt, sequence.attempt if sequence else 0)
        if attempt < newest or (sequence is None and attempt == ended_attempt):
            raise Refused(
                RefusalCode.STALE_ATTEMPT,
                f"Attempt {attempt} of {request.key} is over; the newest here is {newest}, a retry has to be above it.",
            )
        if sequence is not None and sequence.attempt == attempt:
            sequence.callers.append(answer)
            return sequence.reservation.ticket if sequence.reservation else None
        self._check_admissible(request, sequence)
        if sequence is None:
            return self._admit(request, attempt, router_id, answer)
        return self._retry(sequence, request, attempt, router_id, answer)

    def _check_admissible(self, request: GenerateRequest, held: DecodeSequence | None) -> None:
        if self._is_draining and held is None:
            raise self._draining()
        if held is not None and not _is_same_sequence(held.request, request):
            raise Refused(
                RefusalCode.MALFORMED,
                f"{request.key} came again with another prompt or other sampling than in attempt {held.attempt}.",
            )
        self._admission.check(request)

    def _admit(
        self, request: GenerateRequest, attempt: int, router_id: RouterId, answer: TicketAnswer
    ) -> TransferTicket | None:
        sequence = DecodeSequence(
            request=request, attempt=attempt, router_id=router_id, num_pages=self._admission.num_pages_for(request)
        )
        self._queue.append(sequence)
        self._sequences[sequence.key] = sequence
        self._leases.grant(sequence.key, self._clock.now())
        self._grant_waiting()
        if self._queue.is_overfull:
            self._drop(sequence)
            raise Refused(
                RefusalCode.RESOURCE_EXHAUSTED,
                f"{sequence.key} needs {sequence.num_pages} pages, {self._pool.num_free} are free on decode worker "
                f"{self.worker_id} and {len(self._queue)} sequences wait already.",
            )
        sequence.callers.append(answer)
        return sequence.reservation.ticket if sequence.reservation else None

    def _retry(
        self, sequence: DecodeSequence, request: GenerateRequest, attempt: int, router_id: RouterId, answer: TicketAnswer
    ) -> TransferTicket | None:
        """Move a held sequence to a higher attempt; in the waiting list it keeps its place."""
        self._answer_callers(
            sequence,
            Refused(RefusalCode.STALE_ATTEMPT, f"Attempt {sequence.attempt} of {sequence.key} gave way to attempt {attempt}."),
        )
        old_owner = sequence.owner
        sequence.request = request
        sequence.attempt = attempt
        sequence.router_id = router_id
        sequence.callers = [answer]
        self._leases.grant(sequence.key, self._clock.now())
        if sequence.reservation is None:
            return None
        page_ids = sequence.reservation.page_ids
        self._decoding.pop(sequence.key, None)
        sequence.output_token_ids = []
        self._pool.reissue(page_ids, old_owner, sequence.owner)
        sequence.state = DecodeState.WAITING_FOR_COMMIT
        return self._desk.issue(sequence, page_ids)

    def _grant_waiting(self) -> None:
        while sequence := self._queue.next_to_grant(
            num_free_pages=self._pool.num_free, num_free_seats=self._max_num_seqs - len(self._desk)
        ):
            page_ids = self._pool.allocate(sequence.num_pages, sequence.owner, PageState.RESERVED)
            ticket = self._desk.issue(sequence, page_ids)
            sequence.state = DecodeState.WAITING_FOR_COMMIT
            for answer in sequence.callers:
                answer(ticket)

    # Hand-off

    def accept(self, segments: Sequence[Segment]) -> None:
        """Copy segments of one reservation and attempt into its pages. Raises ``Refused`` and has then touched no page."""
        if not segments:
            return
        with self.counters.counting_refusals():
            reservation_id, attempt = segments[0].reservation_id, segments[0].attempt
            if any(segment.reservation_id != reservation_id or segment.attempt != attempt for segment in segments):
                raise Refused(RefusalCode.MALFORMED, "Segments that arrive together belong to one reservation and attempt.")
            sequence, reservation = self._desk.find(reservation_id, attempt)
            if reservation.is_lent:
                raise Refused(
                    RefusalCode.MALFORMED, f"The pages of {sequence.key} are being filled by this worker's own prefill phase."
                )
            # Sent again, once or after the commit: the ledger knows them, and decode's own keys stay untouched.
            segments = reservation.ledger.add(segments)
        self._fill(sequence, reservation)
        for segment in segments:
            self._cache.write(reservation.page_ids[segment.page_ordinal], segment.offset, segment.payload)
            self.counters.num_kv_bytes += segment.payload.nbytes

    def commit(self, commit: HandoffCommit) -> None:
        """Take the hand-off over. Idempotent by (reservation, attempt), for as long as a lease after the sequence's end too.

        Raises ``Refused``: INCOMPLETE, TOKEN_MISMATCH, MALFORMED, or why the reservation does not stand; nothing changed then.
        """
        with self.counters.counting_refusals():
            ended_token_id = self._desk.ended_token_id(commit.reservation_id, commit.attempt)
            if ended_token_id is not None:
                require_token(commit, ended_token_id)
                return
            sequence, reservation = self._desk.find(commit.reservation_id, commit.attempt)
            check_commit(commit, sequence, reservation)
        if sequence.state is DecodeState.WAITING_FOR_COMMIT:
            self._pool.move(reservation.page_ids, sequence.owner, PageState.USED)
            sequence.state = DecodeState.DECODING
            self._decoding[sequence.key] = sequence
            self._append(sequence, commit.token_id, commit.logprobs)

    def lend_pages(self, ticket: TransferTicket) -> tuple[PageId, ...]:
        """The reserved pages, for this worker's prefill phase to compute into; valid until the engine thread's next call.

        Idempotent. Raises ``Refused`` like ``accept`` once the reservation does not stand any more.
        """
        with self.counters.counting_refusals():
            sequence, reservation = self._desk.find(ticket.reservation_id, ticket.attempt)
            if sequence.state is DecodeState.DECODING or reservation.ledger.num_bytes_received:
                raise Refused(
                    RefusalCode.MALFORMED, f"The ticket of {sequence.key} attempt {ticket.attempt} is redeemed already."
                )
        reservation.is_lent = True
        self._fill(sequence, reservation)
        return reservation.page_ids

    def _fill(self, sequence: DecodeSequence, reservation: Reservation) -> None:
        # As a whole: which of its pages has bytes is the ledger's knowledge, not the pool's.
        if not reservation.is_filling:
            reservation.is_filling = True
            self._pool.move(reservation.page_ids, sequence.owner, PageState.FILLING)

    # Steps

    def plan(self) -> StepPlan | None:
        self._grant_waiting()
        rows = tuple(self._row(sequence) for sequence in self._decoding.values())
        if not rows:
            self._outbox.flush()
            return None
        return StepPlan(phase=self.name, rows=rows)

    def _row(self, sequence: DecodeSequence) -> PlanRow:
        assert sequence.reservation is not None
        num_outputs = len(sequence.output_token_ids)
        position = sequence.request.num_prompt_tokens + num_outputs - 1
        return PlanRow(
            key=sequence.key,
            token_ids=(sequence.output_token_ids[-1],),
            start_position=position,
            page_ids=sequence.reservation.page_ids[: self._layout.num_pages_for(position + 1)],
            sample=self._rules.sample_spec(sequence.request, num_outputs),
        )

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        failures = result.failures or (None,) * len(plan.rows)
        for row, token, failure in zip(plan.rows, result.tokens, failures, strict=True):
            sequence = self._decoding[row.key]
            if failure is not None:
                self._fail(sequence, FailureKind.INTERNAL, RefusalCode.UNKNOWN_RESERVATION, failure)
                self.counters.num_row_failures += 1
                continue
            assert token is not None
            self.counters.num_generation_tokens += 1
            self._append(sequence, token.token_id, token.logprobs)
        self._outbox.flush()

    def _append(self, sequence: DecodeSequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        index = len(sequence.output_token_ids)
        sequence.output_token_ids.append(token_id)
        finish_reason = self._rules.finish_reason(sequence.request, index, token_id)
        event = TokenEvent(
            key=sequence.key,
            attempt=sequence.attempt,
            index=index,
            token_id=token_id,
            logprobs=logprobs,
            finish_reason=finish_reason,
        )
        self._outbox.put(sequence.router_id, event)
        if finish_reason is not None:
            self._end(sequence, RefusalCode.UNKNOWN_RESERVATION, f"{sequence.key} has finished.")

    # Ends

    def expire(self, now: float) -> float | None:
        for key in self._leases.expired(now):
            sequence = self._sequences[key]
            self.counters.num_leases_expired += 1
            message = f"No router named {key} for {self._leases.lease_s:g} s, so decode worker {self.worker_id} released it."
            self._fail(sequence, FailureKind.LEASE_EXPIRED, RefusalCode.LEASE_EXPIRED, message)
        return self._leases.next_deadline

    def renew(self, keys: frozenset[SequenceKey]) -> None:
        self._leases.renew(keys, self._clock.now())

    def abort(self, key: SequenceKey, attempt: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.attempt <= attempt:
            self._end(sequence, RefusalCode.UNKNOWN_RESERVATION, f"{key} was released by its router.", fence=attempt)

    def drain(self) -> None:
        self._is_draining = True
        for sequence in self._queue:
            refused = self._draining()
            self.counters.refusals[refused.code] += 1
            self._answer_callers(sequence, refused)
            self._drop(sequence)

    def status(self) -> PhaseStatus:
        return PhaseStatus(num_running=len(self._desk), num_waiting=len(self._queue), num_queued_tokens=0)

    def _fail(self, sequence: DecodeSequence, kind: FailureKind, code: RefusalCode, message: str) -> None:
        failed = SequenceFailed(key=sequence.key, attempt=sequence.attempt, kind=kind, message=message)
        self._outbox.put(sequence.router_id, failed)
        self._end(sequence, code, message)

    def _end(self, sequence: DecodeSequence, code: RefusalCode, message: str, *, fence: int = 0) -> None:
        """Release all that the sequence holds and remember for one lease how it ended. Attempts up to ``fence`` end with it."""
        if sequence.state is DecodeState.ENDED:
            return
        self._answer_callers(sequence, Refused(code, message))
        self._desk.remember_end(sequence, code, message, fence=fence)
        self._drop(sequence)

    def _drop(self, sequence: DecodeSequence) -> None:
        """The one place where pages, seat, lease and place in the list are given back. Idempotent."""
        if sequence.state is DecodeState.ENDED:
            return
        sequence.state = DecodeState.ENDED
        self._queue.remove(sequence)
        self._leases.drop(sequence.key)
        self._decoding.pop(sequence.key, None)
        del self._sequences[sequence.key]
        if sequence.reservation is not None:
            self._desk.close(sequence)
            self._pool.release(sequence.reservation.page_ids, sequence.owner)

    def _draining(self) -> Refused:
        return Refused(RefusalCode.DRAINING, f"Decode worker {self.worker_id} is draining and takes no new sequence.")

    def _answer_callers(self, sequence: DecodeSequence, refused: Refused) -> None:
        if sequence.state is DecodeState.WAITING_FOR_PAGES:
            for answer in sequence.callers:
                answer(refused)


def _is_same_sequence(one: GenerateRequest, other: GenerateRequest) -> bool:
    return one.prompt_token_ids == other.prompt_token_ids and one.sampling == other.sampling
