"""A prefill and a decode phase under any order of admissions, retries from any log, aborts, lease ends, evictions, lost and
delivered segments, with and without a prefix cache; many prompts begin alike."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving_core.clock import ManualClock
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.ids import SequenceKey
from serving_core.token_event import TokenEvent
from serving_core.transfer_ticket import TransferTicket
from tests.page_audit import assert_nothing_shared_is_written
from tests.pages import assert_no_leaks
from tests.phases import (
    LEASE_S,
    ROUTER,
    DecodeSide,
    FakeHandoff,
    PrefillSide,
    deliver,
    expected_tokens,
    make_prompt,
    make_request,
    push_page,
)

COMMON_TEXT = make_prompt(10)
EXPECTED_CODES = {
    RefusalCode.STALE_ATTEMPT,
    RefusalCode.LEASE_EXPIRED,
    RefusalCode.UNKNOWN_RESERVATION,
    RefusalCode.RESOURCE_EXHAUSTED,
    RefusalCode.INCOMPLETE,
}


def check_code(refused: Refused, expected: set[RefusalCode]) -> None:
    assert refused.code in expected, str(refused)


class Wanted:
    """One request as its router sees it. ``requests[a - 1]`` is how it was sent in attempt a: with the log of that moment."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.attempt = 0
        self.requests: list[GenerateRequest] = []
        self.answers: list[tuple[int, TransferTicket | Refused]] = []

    @property
    def ticket(self) -> TransferTicket | None:
        """The ticket of the newest attempt, if it has come."""
        for attempt, answer in reversed(self.answers):
            if attempt == self.attempt:
                return answer if isinstance(answer, TransferTicket) else None
        return None


class PhasePairMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.wanted: list[Wanted] = []
        self.handoffs: list[FakeHandoff] = []

    @initialize(has_prefill_cache=st.booleans(), has_decode_cache=st.booleans())
    def start_workers(self, has_prefill_cache: bool, has_decode_cache: bool) -> None:
        self.decode = DecodeSide(
            self.clock,
            num_pages=8,
            max_num_seqs=3,
            max_waiting=2,
            max_replay_tokens=3,
            has_prefix_cache=has_decode_cache,
        )
        self.prefill = PrefillSide(self.clock, num_pages=6, max_num_batched_tokens=5, has_prefix_cache=has_prefill_cache)
        self.colocated_prefill = PrefillSide(beside=self.decode, max_num_batched_tokens=5, has_prefix_cache=has_decode_cache)
        for side in (self.decode, self.prefill, self.colocated_prefill):
            side.runner.before_run = partial(assert_nothing_shared_is_written, side.pool)

    def _pick(self, number: int) -> Wanted:
        return self.wanted[number % len(self.wanted)]

    def _assert_newest(self, handoff: FakeHandoff) -> None:
        """What decode took is of the newest attempt that it issued under this reservation."""
        of_reservation = [
            answer.attempt
            for wanted in self.wanted
            for _, answer in wanted.answers
            if isinstance(answer, TransferTicket) and answer.reservation_id == handoff.ticket.reservation_id
        ]
        assert handoff.ticket.attempt == max(of_reservation)

    def _reserve(self, wanted: Wanted) -> None:
        attempt = wanted.attempt
        num_evictions = sum(event.key == wanted.request.key for event in self.decode.sink.evictions)
        self.decode.phase.reserve(
            wanted.request,
            attempt,
            ROUTER,
            lambda answer: wanted.answers.append((attempt, answer)),
            num_evictions=num_evictions,
        )

    def _has_heard_end(self, wanted: Wanted) -> bool:
        return any(
            event.key == wanted.request.key
            and event.attempt == wanted.attempt
            and (not isinstance(event, TokenEvent) or event.finish_reason is not None)
            for event in self.decode.sink.events
        )

    def _begin_attempt(self, wanted: Wanted, num_logged: int) -> None:
        """The next attempt, with at most ``num_logged`` of the tokens that came so far."""
        sides = (self.decode, self.prefill, self.colocated_prefill)
        events = [event for side in sides for event in side.sink.tokens_of(wanted.request.key)]
        known = {event.index: event.token_id for event in events}
        log = tuple(known[index] for index in sorted(known))[:num_logged]
        if len(log) == wanted.request.sampling.max_tokens:
            return  # it has ended
        wanted.attempt += 1
        wanted.request = replace(wanted.request, output_token_ids=log)
        wanted.requests.append(wanted.request)

    @precondition(lambda self: len(self.wanted) < 8)
    @rule(
        num_prompt_tokens=st.integers(1, 10),
        num_own_tokens=st.integers(0, 10),
        max_tokens=st.integers(1, 20),
        salt=st.sampled_from([b"", b"", b"salt"]),
    )
    def ask(self, num_prompt_tokens: int, num_own_tokens: int, max_tokens: int, salt: bytes) -> None:
        """Of the prompt the end is its own, all else that of every other."""
        name = f"r{len(self.wanted)}"
        num_common = max(0, num_prompt_tokens - num_own_tokens)
        own = make_request(num_prompt_tokens - num_common, name=name).prompt_token_ids if num_common < num_prompt_tokens else ()
        prompt = COMMON_TEXT[:num_common] + own
        wanted = Wanted(make_request(name=name, prompt_token_ids=prompt, max_tokens=max_tokens, cache_salt=salt))
        self.wanted.append(wanted)
        self._begin_attempt(wanted, 0)
        self._reserve(wanted)

    @precondition(lambda self: self.wanted)
    @rule(number=st.integers(0, 7), is_new_attempt=st.booleans(), num_logged=st.integers(0, 20))
    def ask_again(self, number: int, is_new_attempt: bool, num_logged: int) -> None:
        wanted = self._pick(number)
        if is_new_attempt:
            self._begin_attempt(wanted, num_logged)
        if not self._has_heard_end(wanted):  # else no router repeats the attempt; after a lease nothing would remember it here
            self._reserve(wanted)

    @rule()
    def resume_evicted(self) -> None:
        """What routers do with the evicted, as far as their attempt is the newest."""
        evicted = {(event.key, event.attempt) for event in self.decode.sink.evictions}
        for wanted in self.wanted:
            if (wanted.request.key, wanted.attempt) in evicted:
                self.ask_again(self.wanted.index(wanted), is_new_attempt=True, num_logged=20)

    @precondition(lambda self: self.wanted)
    @rule(number=st.integers(0, 7), is_local=st.booleans())
    def start(self, number: int, is_local: bool) -> None:
        wanted = self._pick(number)
        if wanted.ticket is None:
            return
        try:
            if is_local:
                self.colocated_prefill.admit_local(wanted.request, wanted.ticket)
            else:
                self.handoffs.append(self.prefill.admit(wanted.request, wanted.ticket))
        except Refused as refused:
            check_code(refused, EXPECTED_CODES)

    @precondition(lambda self: self.wanted)
    @rule(number=st.integers(0, 7), num_stages=st.integers(1, 4))
    def carry_on(self, number: int, num_stages: int) -> None:
        """What mostly happens: one sequence goes its way, as far as ``num_stages``."""
        wanted = self._pick(number)
        self.start(number, is_local=False)
        own = [handoff for handoff in self.handoffs if handoff.ticket is wanted.ticket and not handoff.has_ended]
        if num_stages >= 2:
            self.run_prefill_worker(4)
        for handoff in own[-1:]:
            if num_stages >= 3 and not handoff.is_cancelled and handoff.commit is not None:
                deliver(self.prefill, self.decode, handoff)
        if num_stages >= 4:
            self.run_decode_worker(2)

    @precondition(lambda self: self.wanted)
    @rule(num_turns=st.integers(1, 12))
    def carry_all_on(self, num_turns: int) -> None:
        """Undisturbed, so that sequences grow and the evicted come back."""
        self.resume_evicted()
        for number in range(len(self.wanted)):
            self.carry_on(number, 3)
        self.run_decode_worker(num_turns)

    @precondition(lambda self: self.wanted)
    @rule(number=st.integers(0, 7), back=st.integers(0, 1), is_prefill=st.booleans(), is_decode=st.booleans())
    def abort(self, number: int, back: int, is_prefill: bool, is_decode: bool) -> None:
        wanted = self._pick(number)
        attempt = max(0, wanted.attempt - back)
        if is_prefill:
            self.prefill.phase.abort(wanted.request.key, attempt)
            self.colocated_prefill.phase.abort(wanted.request.key, attempt)
        if is_decode:
            self.decode.phase.abort(wanted.request.key, attempt)

    @rule(num_turns=st.integers(1, 4))
    def run_decode_worker(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.decode.step()
            self.colocated_prefill.step()

    @rule(num_turns=st.integers(1, 4))
    def run_prefill_worker(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.prefill.step()

    @precondition(lambda self: self.handoffs)
    @rule(number=st.integers(0, 50))
    def push_one(self, number: int) -> None:
        """Also of hand-offs long cancelled: they were frozen."""
        handoff = self.handoffs[number % len(self.handoffs)]
        if handoff.has_ended or handoff.num_sent == len(handoff.pages):
            return
        try:
            push_page(self.prefill, self.decode, handoff)
        except Refused as refused:
            check_code(refused, EXPECTED_CODES | {RefusalCode.MALFORMED})  # malformed: lent to the local path meanwhile
            self.prefill.end_handoff(handoff, refused)
        else:
            self._assert_newest(handoff)

    @precondition(lambda self: self.handoffs)
    @rule(number=st.integers(0, 50), is_way_lost=st.booleans())
    def finish_handoff(self, number: int, is_way_lost: bool) -> None:
        handoff = self.handoffs[number % len(self.handoffs)]
        if handoff.has_ended or (handoff.commit is None and not handoff.is_cancelled):
            return
        if is_way_lost and not handoff.is_cancelled:
            self.prefill.end_handoff(handoff, WorkerLost("The way is lost."))
        else:
            deliver(self.prefill, self.decode, handoff)

    @precondition(lambda self: self.handoffs)
    @rule(number=st.integers(0, 50))
    def repeat_commit(self, number: int) -> None:
        handoff = self.handoffs[number % len(self.handoffs)]
        if handoff.commit is None:
            return
        try:
            self.decode.phase.commit(handoff.commit)
        except Refused as refused:
            check_code(refused, EXPECTED_CODES | {RefusalCode.MALFORMED})
        else:
            self._assert_newest(handoff)

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(numbers=st.frozensets(st.integers(0, 7)))
    def renew(self, numbers: frozenset[int]) -> None:
        keys = frozenset(self._pick(number).request.key for number in numbers if self.wanted)
        for phase in (self.decode.phase, self.prefill.phase, self.colocated_prefill.phase):
            phase.renew(keys)

    @invariant()
    def sums_are_right(self) -> None:
        self.decode.pool.check()
        self.prefill.pool.check()
        assert self.decode.pool.snapshot().is_sum_ok

    @invariant()
    def idle_phases_hold_no_page(self) -> None:
        """What a worker asserts whenever all of its phases are idle."""
        for pool, phases in (
            (self.decode.pool, (self.decode.phase, self.colocated_prefill.phase)),
            (self.prefill.pool, (self.prefill.phase,)),
        ):
            statuses = [phase.status() for phase in phases]
            is_idle = all(status.num_running == status.num_waiting == 0 for status in statuses)
            assert not is_idle or pool.num_available == pool.num_pages

    @invariant()
    def no_page_is_shared_under_two_salts(self) -> None:
        salts = {wanted.request.key: wanted.request.cache_salt for wanted in self.wanted}
        for pool in (self.decode.pool, self.prefill.pool):
            for record in pool.snapshot().pages:
                assert len({salts[owner.key] for owner in record.owners}) <= 1

    @invariant()
    def streams_are_right(self) -> None:
        """Per attempt: indexes from the last of its log without a gap, tokens of an undisturbed run, nothing after the end."""
        streams: dict[tuple[SequenceKey, int], list[TokenEvent]] = {}
        for event in self.decode.sink.events:
            if isinstance(event, TokenEvent):
                streams.setdefault((event.key, event.attempt), []).append(event)
        for wanted in self.wanted:
            request = wanted.request
            expected = expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)
            for attempt in range(1, wanted.attempt + 1):
                events = streams.get((request.key, attempt), [])
                first = max(0, len(wanted.requests[attempt - 1].output_token_ids) - 1)
                end = first + len(events)
                assert [event.index for event in events] == list(range(first, end))
                assert [event.token_id for event in events] == expected[first:end]
                assert all(event.finish_reason is None for event in events[:-1])
                is_whole = end == len(expected)
                assert not events or is_whole == (events[-1].finish_reason is not None)
            for side in (self.prefill, self.colocated_prefill):
                assert set(side.token_ids(request.key)) <= {expected[0]}

    def teardown(self) -> None:
        """Every router is gone: after one lease nothing is left, whatever went before."""
        self.clock.advance(LEASE_S)
        for side in (self.decode, self.prefill, self.colocated_prefill):
            side.run_out()
        self.prefill.close_cancelled()
        assert_no_leaks(self.decode.pool)
        assert_no_leaks(self.prefill.pool)
        for phase in (self.decode.phase, self.prefill.phase, self.colocated_prefill.phase):
            status = phase.status()
            assert (status.num_running, status.num_waiting) == (0, 0)
            assert phase.expire(self.clock.now()) is None


TestPhasePairMachine = PhasePairMachine.TestCase
TestPhasePairMachine.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
