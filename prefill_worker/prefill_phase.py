"""Prefill: prompts into pages and a first token, then the hand-off. Engine thread only; knows no gRPC.

Life of one sequence:
1. ``admit``: it waits in the queue with the ticket of its attempt.
2. It gets pages for the whole prompt, those that the prefix cache has among them. What these do not hold is computed chunk by
   chunk; full pages are offered to the hand-off meanwhile, and to prompts that begin alike.
3. Its last chunk gives token 0. If that ends the sequence, nothing is committed; else its pages go to *sending*.
4. ``handoff_ended``: acknowledged, and all is released; or not, and the pages are kept for the router's next ticket.
5. ``_end`` lets go of everything, once, from whatever state. Pages that a hand-off may still read wait for its report.

On the local path the decode phase lends the reserved pages, there is no hand-off, and step 3 commits in place.
"""

from __future__ import annotations

from llm_engine.page_pool import PagePool
from llm_engine.phase import PhaseStatus
from llm_engine.phase_counters import PhaseCounters
from llm_engine.step_plan import PlanRow, SampledToken, StepPlan, StepResult
from llm_engine.token_rules import TokenRules
from prefill_worker.admission_check import AdmissionCheck
from prefill_worker.handoff import Handoff, LocalDecode
from prefill_worker.prefill_scheduler import Chunk, PrefillScheduler
from prefill_worker.prefill_sequence import PrefillSequence, PrefillState
from prefill_worker.prompt_pages import PromptPages
from serving_core.clock import Clock
from serving_core.errors import RefusalCode, Refused, TwinpoolError
from serving_core.event_outbox import EventOutbox
from serving_core.event_sink import EventSink
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RouterId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVPageLayout
from serving_core.lease_table import LeaseTable
from serving_core.page_state import PageOwner
from serving_core.recent_endings import RecentEndings
from serving_core.token_event import FailureKind, SequenceFailed, TokenEvent
from serving_core.transfer_ticket import HandoffCommit, TransferTicket
from serving_core.worker_status import PhaseName

_MAX_ENDINGS = 4096

_WORTH_ANOTHER_TICKET = frozenset({RefusalCode.LEASE_EXPIRED, RefusalCode.UNKNOWN_RESERVATION, RefusalCode.STALE_ATTEMPT})
"""Refusals that speak of the reservation, not of the pages: with a new one the same pages will do."""


class PrefillPhase:
    """The prefill phase of one worker; implements ``Phase``.

    ``max_num_batched_tokens`` and ``max_num_seqs`` bound one step. ``local_decode`` is the decode phase mounted on the same
    pool, if there is one. ``has_prefix_cache``: prompts share the pages that they begin with.
    """

    name = PhaseName.PREFILL

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        layout: KVPageLayout,
        pool: PagePool,
        rules: TokenRules,
        sink: EventSink,
        clock: Clock,
        lease_s: float,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        local_decode: LocalDecode | None = None,
        has_prefix_cache: bool = False,
    ) -> None:
        assert layout.page_size == pool.page_size
        self.counters = PhaseCounters()
        self._worker_id = worker_id
        self._layout = layout
        self._pool = pool
        self._rules = rules
        self._clock = clock
        self._local_decode = local_decode
        self._pages = PromptPages(pool, layout, local_decode, has_prefix_cache=has_prefix_cache)
        self._admission = AdmissionCheck(worker_id=worker_id, layout=layout, rules=rules, num_pages=pool.num_pages)
        self._outbox = EventOutbox(sink)
        self._leases = LeaseTable(lease_s)
        self._scheduler = PrefillScheduler(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, max_num_earlier=rules.max_model_len
        )
        self._sequences: dict[SequenceKey, PrefillSequence] = {}
        self._by_open_handoff: dict[PageOwner, PrefillSequence] = {}
        self._ended_attempts: RecentEndings[SequenceKey, int] = RecentEndings(keep_s=lease_s, max_entries=_MAX_ENDINGS)
        self._is_draining = False

    def is_local(self, ticket: TransferTicket) -> bool:
        """Whether the ticket was issued by this very worker, so that no page has to travel. Callable from any thread."""
        return self._local_decode is not None and self._local_decode.worker_id == ticket.decode_worker_id

    # Admission

    def admit(self, request: GenerateRequest, ticket: TransferTicket, router_id: RouterId, handoff: Handoff | None) -> bool:
        """Queue the prompt, or move what is held to a higher attempt: computed pages and a known token are sent again.

        ``handoff`` is None exactly on the local path. Returns whether anything changed: a repeated attempt changes nothing, and
        its hand-off must not be run. Raises ``Refused``.
        """
        assert (handoff is None) == self.is_local(ticket)
        with self.counters.counting_refusals():
            held = self._sequences.get(request.key)
            newest = held.attempt if held else self._ended_attempts.get(request.key, self._clock.now()) or 0
            if ticket.attempt < newest:
                raise Refused(
                    RefusalCode.STALE_ATTEMPT, f"Attempt {ticket.attempt} of {request.key} gave way to attempt {newest}."
                )
            if ticket.attempt == newest or _open_handoff(ticket) in self._by_open_handoff:
                return False
            self._check_admissible(request, ticket, held)
        if held is not None and not held.is_local and handoff is not None:
            self._retarget(held, request, ticket, router_id, handoff)
            return True
        started = PrefillSequence(
            request=request,
            ticket=ticket,
            router_id=router_id,
            handoff=handoff,
            arrived_at=self._clock.now(),
            page_hashes=self._pages.hashes_of(request),
        )
        if started.is_local:
            started.start_behind(ticket.num_cached_tokens)  # the lent pages hold them
        if held is not None:
            # Lent pages cannot leave and own ones cannot become lent: computed again, but token 0 stays what it was.
            self._end(held)
            started.first_token = held.first_token
        self._start(started)
        return True

    def _check_admissible(self, request: GenerateRequest, ticket: TransferTicket, held: PrefillSequence | None) -> None:
        if self._is_draining and held is None:
            raise Refused(RefusalCode.DRAINING, f"Prefill worker {self._worker_id} is draining and takes no new prompt.")
        self._admission.check_ticket(request, ticket)
        self._admission.check_request(request)
        if held is not None:
            self._admission.check_same_sequence(request, held)

    def _start(self, sequence: PrefillSequence) -> None:
        self._sequences[sequence.key] = sequence
        self._scheduler.enqueue(sequence)
        self._begin_attempt(sequence)

    def _retarget(
        self,
        sequence: PrefillSequence,
        request: GenerateRequest,
        ticket: TransferTicket,
        router_id: RouterId,
        handoff: Handoff,
    ) -> None:
        """Send the same pages by another ticket. The old hand-off may read them until it has reported its end."""
        if sequence.handoff is not None:
            sequence.handoff.cancel()
        old_owner = sequence.owner
        sequence.request = request
        sequence.ticket = ticket
        sequence.router_id = router_id
        sequence.handoff = handoff
        sequence.num_offered = 0
        self._pool.rename_owner(sequence.page_ids, old_owner, sequence.owner)
        self._begin_attempt(sequence)
        self._offer_computed(sequence)
        if sequence.num_remaining == 0:
            self._hand_over(sequence)
        elif sequence.state is PrefillState.WAITING_FOR_ROUTER and sequence.page_ids:
            sequence.state = PrefillState.WAITING_FOR_STEP
            self._scheduler.resume(sequence)
        elif sequence.state is PrefillState.WAITING_FOR_ROUTER:
            sequence.state = PrefillState.WAITING_FOR_PAGES
            self._scheduler.enqueue(sequence)

    def _begin_attempt(self, sequence: PrefillSequence) -> None:
        log = sequence.request.output_token_ids
        if log and sequence.first_token is None:
            sequence.first_token = SampledToken(token_id=log[0])
        if sequence.handoff is not None:
            sequence.open_attempts.add(sequence.attempt)
            self._by_open_handoff[sequence.owner] = sequence
        self._leases.grant(sequence.key, self._clock.now())

    # Steps

    def plan(self) -> StepPlan | None:
        self._borrow_local_pages()
        rows = tuple(self._row(chunk) for chunk in self._scheduler.choose(self._take_pages, self._pages.is_coming))
        # A prompt's step may take long, and what is said here concerns other sequences: it does not wait for the step.
        self._outbox.flush()
        return StepPlan(phase=self.name, rows=rows) if rows else None

    def _borrow_local_pages(self) -> None:
        for sequence in tuple(self._scheduler):
            try:
                self._pages.borrow(sequence)
            except Refused as refused:
                self._fail(sequence, FailureKind.HANDOFF, str(refused))

    def _take_pages(self, sequence: PrefillSequence) -> bool:
        if not self._pages.take(sequence):
            return False
        sequence.state = PrefillState.WAITING_FOR_STEP
        if self._pages.has_prefix_cache and not sequence.is_local:
            self.counters.num_prefix_queries += sequence.request.num_prompt_tokens
            self.counters.num_prefix_hits += sequence.num_cached_tokens
        self._offer_computed(sequence)
        return True

    def _row(self, chunk: Chunk) -> PlanRow:
        sequence, start = chunk.sequence, chunk.sequence.num_computed
        stop = start + chunk.num_tokens
        is_sampled = stop == sequence.request.num_prompt_tokens and sequence.first_token is None
        return PlanRow(
            key=sequence.key,
            token_ids=sequence.request.prompt_token_ids[start:stop],
            start_position=start,
            page_ids=sequence.page_ids[: self._layout.num_pages_for(stop)],
            sample=self._rules.sample_spec(sequence.request, ()) if is_sampled else None,
        )

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        failures = result.failures or (None,) * len(plan.rows)
        for row, token, failure in zip(plan.rows, result.tokens, failures, strict=True):
            sequence = self._sequences[row.key]
            if failure is not None:
                self._pages.distrust(sequence)
                self._fail(sequence, FailureKind.INTERNAL, failure)
                continue
            sequence.num_computed += len(row.token_ids)
            self.counters.num_prompt_tokens += len(row.token_ids)
            self._pages.publish(sequence)
            self._offer_computed(sequence)
            if sequence.num_remaining == 0:
                self._complete_prompt(sequence, token)
        self._outbox.flush()

    def _complete_prompt(self, sequence: PrefillSequence, sampled: SampledToken | None) -> None:
        self._scheduler.remove(sequence)
        if sequence.first_token is None:
            assert sampled is not None
            sequence.first_token = sampled
            self.counters.num_generation_tokens += 1
        if not sequence.is_local:
            self._pool.send(sequence.page_ids, sequence.owner)
        self._hand_over(sequence)

    def _hand_over(self, sequence: PrefillSequence) -> None:
        """Tell the router token 0, and commit it unless it ends the sequence."""
        token = sequence.first_token
        assert token is not None
        finish_reason = self._rules.finish_reason(sequence.request, 0, token.token_id)
        early_copy = TokenEvent(
            key=sequence.key,
            attempt=sequence.attempt,
            index=0,
            token_id=token.token_id,
            logprobs=token.logprobs,
            finish_reason=finish_reason,
            num_cached_tokens=sequence.num_cached_tokens,
        )
        self._outbox.put(sequence.router_id, early_copy)
        if finish_reason is not None:
            self._end(sequence)
        elif sequence.handoff is not None:
            sequence.state = PrefillState.WAITING_FOR_DECODE
            sequence.handoff.finish(token.token_id, token.logprobs, num_cached_tokens=sequence.num_cached_tokens)
        else:
            self._commit_in_place(sequence, token)

    def _commit_in_place(self, sequence: PrefillSequence, token: SampledToken) -> None:
        commit = HandoffCommit(
            reservation_id=sequence.ticket.reservation_id,
            key=sequence.key,
            attempt=sequence.attempt,
            token_id=token.token_id,
            logprobs=token.logprobs,
            num_bytes_sent=0,
            num_cached_tokens=sequence.num_cached_tokens,
        )
        assert self._local_decode is not None
        try:
            self._local_decode.commit(commit)
        except Refused as refused:
            self._fail(sequence, FailureKind.HANDOFF, str(refused))
        else:
            self._end(sequence)

    def _offer_computed(self, sequence: PrefillSequence) -> None:
        """Give the hand-off every page that has become final: the full ones, and the last in part once the prompt is done."""
        if sequence.handoff is None:
            return
        is_done = sequence.num_remaining == 0
        num_final = len(sequence.page_ids) if is_done else sequence.num_computed // self._layout.page_size
        first = max(sequence.num_offered, sequence.ticket.num_cached_tokens // self._layout.page_size)
        if first < num_final:
            sequence.handoff.offer([(ordinal, sequence.page_ids[ordinal]) for ordinal in range(first, num_final)])
        sequence.num_offered = num_final

    # Ends

    def handoff_ended(self, key: SequenceKey, attempt: int, error: TwinpoolError | None) -> None:
        """The hand-off of this attempt reads no page any more. ``error`` is None when the decode worker acknowledged, and what
        ended it otherwise; it does not matter for a hand-off that was cancelled. Unknown ones are a no-op."""
        sequence = self._by_open_handoff.pop(PageOwner(key=key, attempt=attempt), None)
        if sequence is None:
            return
        sequence.open_attempts.discard(attempt)
        if sequence.state is PrefillState.ENDED:
            self._pages.release_unread(sequence)
        elif attempt == sequence.attempt:
            if error is None:
                assert sequence.state is PrefillState.WAITING_FOR_DECODE, "acknowledged before it was committed"
                self._end(sequence)
            else:
                self._on_refused(sequence, error)

    def _on_refused(self, sequence: PrefillSequence, error: TwinpoolError) -> None:
        if isinstance(error, Refused) and error.code not in _WORTH_ANOTHER_TICKET:
            self._fail(sequence, FailureKind.HANDOFF, str(error))
            return
        self._scheduler.remove(sequence)
        self._pages.leave_line(sequence)
        sequence.state = PrefillState.WAITING_FOR_ROUTER
        self._report(sequence, FailureKind.HANDOFF, str(error))

    def expire(self, now: float) -> float | None:
        for key in self._leases.expired(now):
            sequence = self._sequences[key]
            self.counters.num_leases_expired += 1
            if sequence.state is PrefillState.WAITING_FOR_ROUTER:
                self._end(sequence)  # its router was told that the attempt failed already
                continue
            message = f"No router named {key} for {self._leases.lease_s:g} s, so prefill worker {self._worker_id} released it."
            self._fail(sequence, FailureKind.LEASE_EXPIRED, message)
        return self._leases.next_deadline

    def renew(self, keys: frozenset[SequenceKey]) -> None:
        self._leases.renew(keys, self._clock.now())

    def abort(self, key: SequenceKey, attempt: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.attempt <= attempt:
            self._end(sequence, fence=attempt)

    def drain(self) -> None:
        self._is_draining = True

    def status(self) -> PhaseStatus:
        """``num_running`` counts every sequence that holds pages or may still be read, ``num_waiting`` the queue."""
        num_waiting = self._scheduler.num_waiting
        num_closing = len({id(s) for s in self._by_open_handoff.values() if s.state is PrefillState.ENDED})
        return PhaseStatus(
            num_running=len(self._sequences) - num_waiting + num_closing,
            num_waiting=num_waiting,
        )

    def _report(self, sequence: PrefillSequence, kind: FailureKind, message: str) -> None:
        failed = SequenceFailed(key=sequence.key, attempt=sequence.attempt, kind=kind, message=message)
        self._outbox.put(sequence.router_id, failed)

    def _fail(self, sequence: PrefillSequence, kind: FailureKind, message: str) -> None:
        self._report(sequence, kind, message)
        self._end(sequence)

    def _end(self, sequence: PrefillSequence, *, fence: int = 0) -> None:
        """The one way out, idempotent: nothing is held afterwards but pages that an open hand-off may be reading."""
        if sequence.state is PrefillState.ENDED:
            return
        sequence.state = PrefillState.ENDED
        if sequence.handoff is not None:
            sequence.handoff.cancel()
        self._scheduler.remove(sequence)
        self._leases.drop(sequence.key)
        del self._sequences[sequence.key]
        self._ended_attempts.remember(sequence.key, max(sequence.attempt, fence), self._clock.now())
        self._pages.leave_line(sequence)
        self._pages.release_unread(sequence)


def _open_handoff(ticket: TransferTicket) -> PageOwner:
    return PageOwner(key=ticket.key, attempt=ticket.attempt)
