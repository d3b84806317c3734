"""How sequences come in on the decode side: fences, the waiting list, first pages, tickets. Knows no segment and no step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from decode_worker.admission_check import AdmissionCheck
from decode_worker.decode_sequence import DecodeSequence, DecodeState, TicketAnswer
from decode_worker.held_sequences import HeldSequences
from decode_worker.prompt_prefix import PromptPrefix
from decode_worker.reservation_desk import ReservationDesk
from llm_engine.page_pool import PagePool
from llm_engine.phase_counters import PhaseCounters
from serving_core.clock import Clock
from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RouterId, SequenceKey
from serving_core.page_state import PageState
from serving_core.transfer_ticket import TransferTicket
from serving_core.worker_status import PhaseName


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveCall:
    """What one caller of ``reserve`` wants; ``answer`` is called with the ticket or a refusal, perhaps later."""

    request: GenerateRequest
    attempt: int
    router_id: RouterId
    num_evictions: int
    answer: TicketAnswer


class Admission:
    """Reservations of one decode phase, from the call to the ticket."""

    def __init__(
        self,
        *,
        check: AdmissionCheck,
        held: HeldSequences,
        desk: ReservationDesk,
        prefix: PromptPrefix,
        pool: PagePool,
        counters: PhaseCounters,
        clock: Clock,
    ) -> None:
        self._check = check
        self._held = held
        self._desk = desk
        self._prefix = prefix
        self._pool = pool
        self._counters = counters
        self._clock = clock
        self._is_draining = False

    def reserve(self, call: ReserveCall) -> None:
        """The same attempt again gets the same ticket. A higher one voids what was promised before: new generations, new
        ticket."""
        try:
            with self._counters.counting_refusals():
                ticket = self._reserve(call)
        except Refused as refused:
            call.answer(refused)
            return
        if ticket is not None:
            call.answer(ticket)

    def withdraw(self, key: SequenceKey, attempt: int, answer: TicketAnswer) -> None:
        """Forget the caller named by its ``answer``. When no other wants the ticket and nothing was sent for it, the
        reservation ends as if it had never been asked for."""
        sequence = self._held.get(key)
        if sequence is None or sequence.attempt != attempt or answer not in sequence.callers:
            return
        sequence.callers.remove(answer)
        is_untouched = sequence.reservation is None or not sequence.reservation.is_filling
        if not sequence.callers and is_untouched:
            self._held.drop(sequence)

    def grant_waiting(self) -> None:
        """Give first pages to those whose turn it is, as far as there is room."""
        while sequence := self._held.queue.next_to_grant(self._held.seats.is_room_for):
            found = self._prefix.pin(sequence)
            fresh = self._pool.allocate(sequence.num_first_pages - len(found), sequence.owner, PageState.RESERVED)
            self._held.seats.take(sequence)
            ticket = self._desk.issue(sequence, found + fresh, num_verified_pages=len(found))
            sequence.state = DecodeState.WAITING_FOR_COMMIT
            for answer in sequence.callers:
                answer(ticket)
        self._stand_in_line()

    def _stand_in_line(self) -> None:
        first = next(iter(self._held.queue), None)
        if first is None:
            self._pool.line.leave(PhaseName.DECODE)
        else:
            self._pool.line.wait(PhaseName.DECODE, first.num_first_pages, first.arrived_at)

    def drain(self) -> None:
        """Take no new sequence from now on, and turn those away that wait."""
        self._is_draining = True
        for sequence in self._held.queue:
            refused = self._draining()
            self._counters.refusals[refused.code] += 1
            sequence.answer_callers(refused)
            self._held.drop(sequence)

    def _reserve(self, call: ReserveCall) -> TransferTicket | None:
        """The ticket if it is there already; else None, with the caller kept for when it is."""
        request, attempt = call.request, call.attempt
        if attempt < 1:
            raise Refused(RefusalCode.MALFORMED, f"Attempt {attempt} of {request.key} must be at least 1.")
        sequence = self._held.get(request.key)
        ended_attempt = self._desk.ended_attempt(request.key)
        newest = max(ended_attempt, sequence.attempt if sequence else 0)
        if attempt < newest or (sequence is None and attempt == ended_attempt):
            raise Refused(
                RefusalCode.STALE_ATTEMPT,
                f"Attempt {attempt} of {request.key} is over; the newest here is {newest}, a retry has to be above it.",
            )
        if sequence is not None and sequence.attempt == attempt:
            sequence.callers.append(call.answer)
            return sequence.reservation.ticket if sequence.reservation else None
        self._check_admissible(request, sequence)
        if sequence is None:
            return self._admit(call)
        gave_way = f"Attempt {sequence.attempt} of {sequence.key} gave way to attempt {attempt}."
        if sequence.num_in_flight > 0:  # a step writes into its pages, so they cannot be promised again
            self._held.end(sequence, RefusalCode.STALE_ATTEMPT, gave_way)
            return self._admit(call)
        sequence.answer_callers(Refused(RefusalCode.STALE_ATTEMPT, gave_way))
        return self._retry(sequence, call)

    def _check_admissible(self, request: GenerateRequest, held: DecodeSequence | None) -> None:
        if self._is_draining and held is None:
            raise self._draining()
        if held is not None and not request.is_same_sequence(held.request):
            raise Refused(
                RefusalCode.MALFORMED,
                f"{request.key} came again with another prompt, sampling or cache salt than in attempt {held.attempt}.",
            )
        self._check.check(request)

    def _admit(self, call: ReserveCall) -> TransferTicket | None:
        sequence = DecodeSequence(
            request=call.request,
            attempt=call.attempt,
            router_id=call.router_id,
            num_evictions=call.num_evictions,
            num_first_pages=self._check.first_pages_for(call.request, call.num_evictions),
            max_pages=self._check.max_pages_for(call.request),
            arrived_at=self._clock.now(),
            page_hashes=self._prefix.hashes_of(call.request),
        )
        self._held.add(sequence)
        self.grant_waiting()
        if sequence.reservation is None and self._held.queue.is_overfull(sequence):
            self._held.drop(sequence)
            raise Refused(
                RefusalCode.RESOURCE_EXHAUSTED,
                f"{sequence.key} needs {sequence.num_first_pages} pages, {self._pool.num_available} are free on decode worker "
                f"{self._check.worker_id} and {len(self._held.queue)} sequences wait already.",
            )
        sequence.callers.append(call.answer)
        return sequence.reservation.ticket if sequence.reservation else None

    def _retry(self, sequence: DecodeSequence, call: ReserveCall) -> TransferTicket | None:
        """Move a held sequence to a higher attempt. It keeps its pages and its age, or its place in the waiting list; what a
        longer log needs beyond the pages held is taken when it is replayed. Verified pages keep what they hold, too."""
        old_owner = sequence.owner
        sequence.request = call.request
        sequence.attempt = call.attempt
        sequence.router_id = call.router_id
        sequence.num_evictions = call.num_evictions
        sequence.num_first_pages = self._check.first_pages_for(call.request, call.num_evictions)
        sequence.callers = [call.answer]
        self._held.grant_lease(sequence)
        if sequence.reservation is None:
            return None
        held = sequence.reservation
        sequence.output_token_ids = array("i")
        sequence.sample_template = None
        sequence.num_cached_outputs = 0
        self._pool.rename_owner(held.verified_page_ids, old_owner, sequence.owner)
        self._pool.reissue(held.own_page_ids, old_owner, sequence.owner)
        sequence.state = DecodeState.WAITING_FOR_COMMIT
        return self._desk.issue(sequence, held.page_ids, num_verified_pages=held.num_verified_pages)

    def _draining(self) -> Refused:
        return Refused(RefusalCode.DRAINING, f"Decode worker {self._check.worker_id} is draining and takes no new sequence.")
