"""Both phases together: the rules of the hand-off that need two sides, on two pools and on one."""

from __future__ import annotations

import pytest

from serving_core.clock import ManualClock
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.page_state import PageState
from serving_core.token_event import FailureKind, FinishReason
from serving_core.transfer_ticket import TransferTicket
from tests.pages import assert_no_leaks
from tests.phases import (
    LEASE_S,
    DecodeSide,
    FakeHandoff,
    PrefillSide,
    deliver,
    expected_tokens,
    make_request,
    push_page,
)

EDGES = [1, 3, 4, 5, 7, 8, 9, 12, 13]


class Pair:
    """A prefill worker and two decode workers under one clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.prefill = PrefillSide(self.clock, max_num_batched_tokens=6)
        self.decode = DecodeSide(self.clock)
        self.other = DecodeSide(self.clock, name="decode-1", incarnation="d1")

    def assert_no_leaks(self) -> None:
        for side in (self.prefill, self.decode, self.other):
            assert_no_leaks(side.pool)


@pytest.mark.parametrize("num_prompt_tokens", EDGES)
def test_split_equals_unsplit(num_prompt_tokens: int) -> None:
    request = make_request(num_prompt_tokens, max_tokens=7)
    # 1. Over two pools.
    pair = Pair()
    handoff = pair.prefill.admit(request, pair.decode.reserve(request))
    pair.prefill.run_out()
    deliver(pair.prefill, pair.decode, handoff)
    pair.decode.run_out()
    # 2. On one pool, in place.
    decode = DecodeSide()
    prefill = PrefillSide(beside=decode, max_num_batched_tokens=6)
    assert prefill.admit_local(request, decode.reserve(request))
    prefill.run_out()
    decode.run_out()
    # 3. The same tokens, and nothing left on either.
    expected = expected_tokens(request.prompt_token_ids, 7)
    assert pair.decode.token_ids(request.key) == expected
    assert decode.token_ids(request.key) == expected
    assert pair.prefill.token_ids(request.key) == prefill.token_ids(request.key) == expected[:1]
    pair.assert_no_leaks()
    assert_no_leaks(decode.pool)


def test_a_decode_worker_that_dies_before_it_began_costs_no_recomputing() -> None:
    pair = Pair()
    request = make_request(10)
    # 1. Half the pages are with decode-0 when it dies.
    old = pair.prefill.admit(request, pair.decode.reserve(request, 1))
    pair.prefill.run_out()
    push_page(pair.prefill, pair.decode, old)
    # 2. The router reserves on decode-1 and starts attempt 2 on the same prefill worker.
    new = pair.prefill.admit(request, pair.other.reserve(request, 2))
    pair.prefill.end_handoff(old, None)
    num_rows = len(pair.prefill.runner.plans)
    assert pair.prefill.step() is None
    # 3. The same pages go there and the answer is the same.
    deliver(pair.prefill, pair.other, new)
    pair.other.run_out()
    assert len(pair.prefill.runner.plans) == num_rows
    assert pair.other.token_ids(request.key) == expected_tokens(request.prompt_token_ids, 5)
    # 4. What decode-0 held goes with its process; here its lease ends it.
    pair.clock.advance(LEASE_S)
    pair.decode.step()
    pair.assert_no_leaks()


def test_a_frozen_prefill_worker_that_wakes_writes_nothing() -> None:
    pair = Pair()
    request = make_request(10)
    # 1. Prefill is frozen after one page of attempt 1.
    stale = pair.prefill.admit(request, pair.decode.reserve(request, 1))
    pair.prefill.run_out()
    push_page(pair.prefill, pair.decode, stale)
    # 2. The router retries through another prefill worker.
    second = PrefillSide(pair.clock)
    fresh = second.admit(request, pair.decode.reserve(request, 2))
    second.run_out()
    deliver(second, pair.decode, fresh)
    pair.decode.step()
    # 3. The first one wakes and goes on as if nothing had been.
    before = [bytes(page) for page in pair.decode.cache.pages]
    deliver(pair.prefill, pair.decode, stale)
    assert [bytes(page) for page in pair.decode.cache.pages] == before
    assert pair.decode.phase.counters.refusals[RefusalCode.STALE_ATTEMPT] == 1
    pair.decode.run_out()
    assert pair.decode.token_ids(request.key) == expected_tokens(request.prompt_token_ids, 5)
    # 4. It keeps its pages only until its own lease ends.
    pair.clock.advance(LEASE_S)
    pair.prefill.run_out()
    assert_no_leaks(second.pool)
    pair.assert_no_leaks()


def test_the_lease_ends_while_pushing() -> None:
    pair = Pair()
    request = make_request(16)
    # 1. One page has arrived, the second chunk is still to come, when decode's lease ends.
    handoff = pair.prefill.admit(request, pair.decode.reserve(request))
    pair.prefill.step()
    push_page(pair.prefill, pair.decode, handoff)
    pair.clock.advance(LEASE_S - 1)
    pair.prefill.phase.renew(frozenset({request.key}))
    pair.clock.advance(1.0)
    pair.decode.step()
    pair.prefill.step()
    with pytest.raises(Refused) as refused:
        push_page(pair.prefill, pair.decode, handoff)
    assert refused.value.code is RefusalCode.LEASE_EXPIRED
    # 2. Prefill stops, keeps its pages and tells the router.
    pair.prefill.end_handoff(handoff, refused.value)
    assert pair.prefill.step() is None
    assert pair.prefill.sink.failures[-1].message == str(refused.value)
    assert pair.prefill.pool.counts()[PageState.USED] == 4
    num_computed = pair.prefill.phase.counters.num_prompt_tokens
    # 3. A new reservation: only the rest is computed.
    again = pair.prefill.admit(request, pair.decode.reserve(request, 2))
    pair.prefill.run_out()
    assert pair.prefill.phase.counters.num_prompt_tokens == 16
    assert num_computed > 0
    deliver(pair.prefill, pair.decode, again)
    pair.decode.run_out()
    assert pair.decode.token_ids(request.key) == expected_tokens(request.prompt_token_ids, 5)
    pair.assert_no_leaks()


def test_only_decode_says_that_a_handoff_happened() -> None:
    pair = Pair()
    request = make_request(10)
    handoff = pair.prefill.admit(request, pair.decode.reserve(request))
    pair.prefill.run_out()
    pair.decode.run_out()
    assert pair.prefill.token_ids(request.key) != []  # the early copy
    assert pair.decode.sink.emits == []
    deliver(pair.prefill, pair.decode, handoff)
    pair.decode.step()
    assert pair.decode.sink.tokens_of(request.key)[0].index == 0


def test_a_request_that_prefill_ends_is_released_on_decode_by_the_router() -> None:
    pair = Pair()
    request = make_request(10, max_tokens=1)
    handoff = pair.prefill.admit(request, pair.decode.reserve(request))
    pair.prefill.run_out()
    assert handoff.commit is None
    pair.prefill.close_cancelled()
    assert_no_leaks(pair.prefill.pool)
    pair.decode.phase.abort(request.key, 1)
    pair.assert_no_leaks()


def test_a_commit_whose_answer_was_lost_is_repeated_until_acknowledged() -> None:
    pair = Pair()
    request = make_request(10, max_tokens=3)
    handoff = pair.prefill.admit(request, pair.decode.reserve(request))
    pair.prefill.run_out()
    while handoff.num_sent < len(handoff.pages):
        push_page(pair.prefill, pair.decode, handoff)
    assert handoff.commit is not None
    pair.decode.phase.commit(handoff.commit)  # the answer is lost, and the sequence even ends before the next try
    pair.decode.run_out()
    deliver(pair.prefill, pair.decode, handoff)
    assert pair.decode.token_ids(request.key) == expected_tokens(request.prompt_token_ids, 3)
    assert pair.prefill.sink.failures == []
    pair.assert_no_leaks()


class Colocated:
    def __init__(self, num_pages: int = 16, *, eos: frozenset[int] = frozenset()) -> None:
        self.decode = DecodeSide(num_pages=num_pages, eos=eos)
        self.prefill = PrefillSide(beside=self.decode, max_num_batched_tokens=6, eos=eos)
        self.pool = self.decode.pool

    def turn(self) -> bool:
        return any([self.decode.step() is not None, self.prefill.step() is not None])

    def run_out(self) -> None:
        while self.turn():
            pass
        self.decode.step()


def test_the_local_path_copies_no_page_and_takes_no_second_set() -> None:
    worker = Colocated(num_pages=4)
    request = make_request(11, max_tokens=5)  # at its longest it needs the whole pool
    assert worker.prefill.admit_local(request, worker.decode.reserve(request))
    assert not worker.prefill.admit_local(request, worker.decode.reserve(request))
    worker.turn()
    assert worker.pool.counts()[PageState.FILLING] == 3
    worker.run_out()
    assert worker.decode.token_ids(request.key) == expected_tokens(request.prompt_token_ids, 5)
    assert worker.decode.phase.counters.num_kv_bytes == 0
    assert_no_leaks(worker.pool)


@pytest.mark.parametrize("num_turns", [0, 1, 2])
def test_a_local_reservation_that_is_gone_is_never_written_to(num_turns: int) -> None:
    worker = Colocated()
    request, other = make_request(16), make_request(40, name="other", max_tokens=20)
    # 1. Prefill is at work in lent pages.
    worker.prefill.admit_local(request, worker.decode.reserve(request))
    for _ in range(num_turns):
        worker.turn()
    # 2. The router releases the decode side first; another sequence gets the pages.
    worker.decode.phase.abort(request.key, 1)
    worker.decode.begin(other)
    # 3. Prefill learns it before its next step and ends.
    worker.run_out()
    (failure,) = worker.prefill.sink.failures
    assert (failure.kind, failure.message) == (FailureKind.HANDOFF, "a/0 was released by its router.")
    assert worker.decode.token_ids(other.key) == expected_tokens(other.prompt_token_ids, 20)
    assert_no_leaks(worker.pool)


def test_a_local_retry_computes_into_the_new_promise() -> None:
    worker = Colocated()
    request = make_request(16)
    worker.prefill.admit_local(request, worker.decode.reserve(request, 1))
    worker.turn()
    worker.prefill.admit_local(request, worker.decode.reserve(request, 2))
    worker.run_out()
    assert worker.prefill.sink.failures == []
    assert worker.decode.token_ids(request.key, 2) == expected_tokens(request.prompt_token_ids, 5)
    assert_no_leaks(worker.pool)


def test_a_retry_may_leave_the_local_path_and_come_back() -> None:
    worker = Colocated()
    other = DecodeSide(worker.decode.clock, name="decode-1", incarnation="d1")
    request = make_request(12)
    # 1. Local first; the router then prefers another decode worker.
    worker.prefill.admit_local(request, worker.decode.reserve(request, 1))
    worker.turn()
    away = worker.prefill.admit(request, other.reserve(request, 2))
    worker.decode.phase.abort(request.key, 1)
    worker.prefill.run_out()
    assert away.commit is not None
    # 2. That one dies; back to the local path, with the token that is known.
    worker.prefill.admit_local(request, worker.decode.reserve(request, 3))
    assert away.is_cancelled
    worker.prefill.close_cancelled()
    worker.run_out()
    assert worker.prefill.phase.counters.num_generation_tokens == 1
    assert worker.decode.token_ids(request.key, 3) == expected_tokens(request.prompt_token_ids, 5)
    other.phase.abort(request.key, 2)
    assert_no_leaks(worker.pool)
    assert_no_leaks(other.pool)


def test_a_local_request_that_ends_with_its_first_token_leaves_the_reservation_to_the_router() -> None:
    worker = Colocated()
    request = make_request(6, max_tokens=1)
    worker.prefill.admit_local(request, worker.decode.reserve(request))
    worker.run_out()
    (event,) = worker.prefill.sink.tokens_of(request.key)
    assert event.finish_reason is FinishReason.LENGTH
    assert worker.decode.sink.emits == []
    worker.decode.phase.abort(request.key, 1)
    assert_no_leaks(worker.pool)


def test_a_local_prompt_passes_one_that_waits_for_the_pages_it_holds() -> None:
    worker = Colocated(num_pages=4)
    elsewhere = DecodeSide(worker.decode.clock, name="decode-1", incarnation="d1")
    local, remote = make_request(8, max_tokens=4), make_request(9, name="remote")
    ticket = worker.decode.reserve(local)
    handoff = worker.prefill.admit(remote, elsewhere.reserve(remote))
    worker.prefill.admit_local(local, ticket)
    worker.run_out()
    assert worker.decode.token_ids(local.key) == expected_tokens(local.prompt_token_ids, 4)
    assert handoff.commit is not None
    deliver(worker.prefill, elsewhere, handoff)
    assert_no_leaks(worker.pool)


def test_local_requests_without_end_do_not_starve_a_prompt_for_another_worker() -> None:
    worker = Colocated(num_pages=6)
    elsewhere = DecodeSide(worker.decode.clock, name="decode-1", incarnation="d1")
    remote = make_request(17, name="remote", max_tokens=2)  # five pages
    handoff: FakeHandoff | None = None
    # 1. Two local requests at any time, and after a while a prompt that needs nearly the whole pool.
    waiting: list[tuple[GenerateRequest, list[TransferTicket | Refused]]] = []
    for turn in range(200):
        worker.decode.clock.advance(0.001)
        if len(waiting) < 2:
            local = make_request(6, name=f"local{turn}", max_tokens=5)
            waiting.append((local, worker.decode.ask(local)))
        for local, answers in tuple(waiting):
            if answers:
                assert isinstance(answers[0], TransferTicket)
                worker.prefill.admit_local(local, answers[0])
                waiting.remove((local, answers))
        if turn == 20:
            handoff = worker.prefill.admit(remote, elsewhere.reserve(remote))
        worker.turn()
        if handoff is not None and handoff.commit is not None:
            break
    # 2. It had its turn, and those behind it have theirs.
    assert handoff is not None
    assert handoff.commit is not None
    deliver(worker.prefill, elsewhere, handoff)
    worker.run_out()
    assert all(answers for _, answers in waiting)


def test_prompts_for_another_worker_without_end_do_not_starve_a_reservation() -> None:
    worker = Colocated(num_pages=6)
    elsewhere = DecodeSide(worker.decode.clock, num_pages=64, name="decode-1", incarnation="d1")
    answers: list[TransferTicket | Refused] = []
    open_handoffs: list[FakeHandoff] = []
    local = make_request(17, name="local", max_tokens=3)
    for turn in range(200):
        worker.decode.clock.advance(0.001)
        # 1. Another prompt in each turn, delivered a little later.
        remote = make_request(6, name=f"remote{turn}", max_tokens=2)
        open_handoffs.append(worker.prefill.admit(remote, elsewhere.reserve(remote)))
        if turn == 10:
            answers = worker.decode.ask(local)
            assert answers == []
        worker.turn()
        while len(open_handoffs) > 2 and open_handoffs[0].commit is not None:
            deliver(worker.prefill, elsewhere, open_handoffs.pop(0))
        elsewhere.run_out()
        if answers:
            break
    # 2. The reservation had its turn.
    assert isinstance(answers[0], TransferTicket)


def test_a_prompt_that_leaves_the_line_holds_up_nobody() -> None:
    worker = Colocated(num_pages=6)
    elsewhere = DecodeSide(worker.decode.clock, name="decode-1", incarnation="d1")
    held, remote, local = (
        make_request(11, name="held", max_tokens=1),
        make_request(17, name="remote"),
        make_request(6, name="local"),
    )
    worker.decode.reserve(held)
    worker.decode.clock.advance(0.001)
    worker.prefill.admit(remote, elsewhere.reserve(remote))
    worker.turn()
    worker.decode.clock.advance(0.001)
    answers = worker.decode.ask(local)
    assert answers == []
    worker.prefill.phase.abort(remote.key, 1)
    worker.decode.step()
    assert isinstance(answers[0], TransferTicket)


def test_a_local_failed_commit_is_told() -> None:
    """The reservation is released between the last plan and its end only if a call could run there; none can. A log that
    denies the token is what is left."""
    worker = Colocated()
    request = make_request(6)
    ticket = worker.decode.reserve(make_request(6, output_token_ids=(1,)))
    worker.prefill.admit_local(request, ticket)
    worker.run_out()
    (failure,) = worker.prefill.sink.failures
    assert "names token 910, but 1 stands" in failure.message
    worker.decode.phase.abort(request.key, 1)
    assert_no_leaks(worker.pool)


def test_a_lost_worker_keeps_pages_and_a_release_ends_it() -> None:
    pair = Pair()
    request = make_request(10)
    handoff = pair.prefill.admit(request, pair.decode.reserve(request))
    pair.prefill.run_out()
    pair.prefill.end_handoff(handoff, WorkerLost("It is gone."))
    assert pair.prefill.pool.counts()[PageState.SENDING] == 3
    pair.prefill.phase.abort(request.key, 1)
    pair.decode.phase.abort(request.key, 1)
    pair.assert_no_leaks()
