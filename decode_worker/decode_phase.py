"""Decode: admission of handed-over sequences, continuous batching, token streams. Engine thread only; knows no gRPC.

Life of one sequence:
1. ``reserve``: its first pages are reserved, at once or in order of arrival; a ticket answers the caller, and says how much of
   the prompt is here already.
2. ``accept`` copies checked segments into the pages (or ``lend_pages`` hands them to this worker's own prefill phase).
3. ``commit`` verifies that all arrived and takes token 0; from here on the hand-off has happened.
4. ``plan`` and ``apply`` replay the router's log, if there is one, then add a token a step until a token rule ends it.
5. It ends once, from whatever state, and holds nothing then: ended, aborted, withdrawn, failed, evicted for an older sequence
   that grew, or no router named it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

from decode_worker.admission import Admission, ReserveCall
from decode_worker.admission_check import AdmissionCheck
from decode_worker.admission_queue import AdmissionQueue
from decode_worker.commit_check import check_commit, require_token
from decode_worker.decode_scheduler import MAX_REPLAY_TOKENS, DecodeScheduler
from decode_worker.decode_sequence import DecodeSequence, DecodeState, RowUnderWay, TicketAnswer
from decode_worker.held_sequences import HeldSequences
from decode_worker.page_intake import KVWriter, PageIntake
from decode_worker.prompt_prefix import PromptPrefix
from decode_worker.reservation_desk import ReservationDesk
from decode_worker.seats import Seats
from kv_transfer.page_transport import Segment
from llm_engine.page_pool import PagePool
from llm_engine.phase import PhaseStatus
from llm_engine.phase_counters import PhaseCounters
from llm_engine.step_plan import PlanRow, StepPlan, StepResult
from llm_engine.token_rules import TokenRules
from serving_core.clock import Clock
from serving_core.errors import RefusalCode
from serving_core.event_outbox import EventOutbox
from serving_core.event_sink import EventSink
from serving_core.generate_request import GenerateRequest
from serving_core.ids import Incarnation, PageId, ReservationId, RouterId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVPageLayout
from serving_core.lease_table import LeaseTable
from serving_core.page_state import PageState
from serving_core.token_event import FailureKind, TokenEvent, TokenLogprobs
from serving_core.transfer_ticket import HandoffCommit, TransferTicket
from serving_core.worker_status import PhaseName


class DecodePhase:
    """The decode phase of one worker; implements ``Phase``, and ``LocalDecode`` of the prefill phase beside it.

    ``address`` is where prefill workers reach this worker. ``new_reservation_id`` makes ids never used before by any process.
    ``max_num_seqs`` bounds the sequences that hold pages, ``max_waiting`` those of either kind that wait for some (see
    ``AdmissionQueue``), ``max_replay_tokens`` what one step replays of logs. ``has_prefix_cache``: pages of prompts and answers
    stay for prompts that begin with them.
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
        max_replay_tokens: int = MAX_REPLAY_TOKENS,
        has_prefix_cache: bool = False,
    ) -> None:
        assert layout.page_size == pool.page_size
        self.worker_id = worker_id
        self.counters = PhaseCounters()
        self._pool = pool
        self._rules = rules
        self._clock = clock
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
        self._seats = Seats(pool, max_num_seqs)
        self._prefix = PromptPrefix(pool, self.counters, is_enabled=has_prefix_cache)
        self._held = HeldSequences(
            pool=pool,
            desk=self._desk,
            prefix=self._prefix,
            queue=self._queue,
            seats=self._seats,
            leases=self._leases,
            outbox=self._outbox,
            counters=self.counters,
            clock=clock,
        )
        check = AdmissionCheck(worker_id=worker_id, layout=layout, rules=rules, num_pages=pool.num_pages)
        self._admission = Admission(
            check=check,
            held=self._held,
            desk=self._desk,
            prefix=self._prefix,
            pool=pool,
            counters=self.counters,
            clock=clock,
        )
        self._intake = PageIntake(desk=self._desk, pool=pool, cache=cache, counters=self.counters)
        self._scheduler = DecodeScheduler(layout=layout, rules=rules, max_replay_tokens=max_replay_tokens)
        self._under_way: deque[tuple[RowUnderWay, ...]] = deque()  # of each plan that was not applied

    # Reservation

    def reserve(
        self, request: GenerateRequest, attempt: int, router_id: RouterId, answer: TicketAnswer, *, num_evictions: int = 0
    ) -> None:
        """Promise pages for prompt, log and a token more; ``answer`` is called with the ticket or a refusal, perhaps later.

        The same attempt again gets the same ticket. A higher one voids what was promised before: new generations, new ticket.
        A sequence that was evicted ``num_evictions`` times, here or elsewhere, is promised more, and may wait longer for it.
        """
        self._admission.reserve(
            ReserveCall(request=request, attempt=attempt, router_id=router_id, num_evictions=num_evictions, answer=answer)
        )

    def withdraw(self, key: SequenceKey, attempt: int, answer: TicketAnswer) -> None:
        """Forget a caller of ``reserve`` that has gone, named by its ``answer``; its reservation goes if nobody else wants it
        and nothing was sent for it."""
        self._admission.withdraw(key, attempt, answer)

    # Hand-off

    def accept(self, segments: Sequence[Segment]) -> None:
        """Copy segments of one reservation and attempt into its pages. Raises ``Refused`` and has then touched no page."""
        self._intake.accept(segments)

    def lend_pages(self, ticket: TransferTicket) -> tuple[PageId, ...]:
        """The reserved pages, for this worker's prefill phase to compute into, but for those that the ticket's cached tokens
        fill; valid until the engine thread's next call.

        Idempotent. Raises ``Refused`` like ``accept`` once the reservation does not stand any more.
        """
        return self._intake.lend_pages(ticket)

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
            self._rules.check_commit(commit)
            check_commit(commit, sequence, reservation)
        if sequence.state is DecodeState.WAITING_FOR_COMMIT:
            self._pool.move(reservation.own_page_ids, sequence.owner, PageState.USED)
            self._prefix.publish_prompt(sequence)
            sequence.state = DecodeState.DECODING
            self._begin(sequence, commit)

    def _begin(self, sequence: DecodeSequence, commit: HandoffCommit) -> None:
        """Take token 0, or the whole log, whose last token tells the router that the hand-off happened."""
        known = sequence.request.output_token_ids or (commit.token_id,)
        sequence.sample_template = self._rules.sample_template(sequence.request)
        sequence.output_token_ids = array("i", known[:-1])
        if len(known) == 1:
            self._append(sequence, known[0], commit.logprobs, num_cached_tokens=commit.num_cached_tokens)
        else:
            self._append(sequence, known[-1], None)

    # Steps

    def plan(self) -> StepPlan | None:
        """Those who run take pages first, the oldest before the others, at the cost of the youngest; then those who wait."""
        rows = self._scheduler.choose(self._seats, self._take_pages)
        self._admission.grant_waiting()
        if not rows:
            self._outbox.flush()
            return None
        self._under_way.append(tuple(self._begin_row(row) for row in rows))
        return StepPlan(phase=self.name, rows=rows)

    def _begin_row(self, row: PlanRow) -> RowUnderWay:
        sequence = self._held[row.key]
        sequence.num_in_flight += len(row.token_ids)
        sequence.num_not_yet_known += row.sample is not None
        # The step's own claim, so that nobody gets these pages before it is over, should the sequence end meanwhile.
        written = row.page_ids[row.start_position // self._pool.page_size :]
        self._pool.adopt(written, sequence.owner)
        return RowUnderWay(sequence=sequence, owner=sequence.owner, written_page_ids=written)

    def _take_pages(self, sequence: DecodeSequence, num_pages: int) -> bool:
        return self._seats.grow(sequence, num_pages, self._held.evict)

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        failures = result.failures or (None,) * len(plan.rows)
        under_way = self._under_way.popleft()
        for row, begun, token, failure in zip(plan.rows, under_way, result.tokens, failures, strict=True):
            sequence = begun.sequence
            self._pool.release(begun.written_page_ids, begun.owner)
            if sequence.state is DecodeState.ENDED:
                continue
            sequence.num_in_flight -= len(row.token_ids)
            sequence.num_not_yet_known -= row.sample is not None
            if failure is not None:
                self._held.fail(sequence, FailureKind.INTERNAL, RefusalCode.UNKNOWN_RESERVATION, failure)
                continue
            sequence.num_cached_outputs += len(row.token_ids)
            if token is not None:  # else the replay of its log goes on
                self.counters.num_generation_tokens += 1
                self._append(sequence, token.token_id, token.logprobs)
        self._outbox.flush()

    def _append(
        self, sequence: DecodeSequence, token_id: int, logprobs: TokenLogprobs | None, *, num_cached_tokens: int = 0
    ) -> None:
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
            num_cached_tokens=num_cached_tokens,
        )
        self._outbox.put(sequence.router_id, event)
        if finish_reason is not None:
            self._held.end(sequence, RefusalCode.UNKNOWN_RESERVATION, f"{sequence.key} has finished.")

    # Ends

    def expire(self, now: float) -> float | None:
        for sequence in self._held.expired(now):
            self.counters.num_leases_expired += 1
            message = (
                f"No router named {sequence.key} for {self._leases.lease_s:g} s, so decode worker {self.worker_id} released it."
            )
            self._held.fail(sequence, FailureKind.LEASE_EXPIRED, RefusalCode.LEASE_EXPIRED, message)
        return self._leases.next_deadline

    def renew(self, keys: frozenset[SequenceKey]) -> None:
        self._leases.renew(keys, self._clock.now())

    def abort(self, key: SequenceKey, attempt: int) -> None:
        sequence = self._held.get(key)
        if sequence is not None and sequence.attempt <= attempt:
            self._held.end(sequence, RefusalCode.UNKNOWN_RESERVATION, f"{key} was released by its router.", fence=attempt)

    def drain(self) -> None:
        self._admission.drain()

    def status(self) -> PhaseStatus:
        under_way = (row.sequence for rows in self._under_way for row in rows)
        ending = {sequence.key for sequence in under_way if sequence.state is DecodeState.ENDED}  # their steps are not over
        return PhaseStatus(num_running=len(self._seats) + len(ending), num_waiting=len(self._queue))
