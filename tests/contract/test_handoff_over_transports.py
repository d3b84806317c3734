"""A whole hand-off over every transport: pages while they are computed, the commit, and every way it can end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from kv_transfer.backoff import Backoff
from kv_transfer.outgoing_handoff import HandoffState, OutgoingHandoff
from kv_transfer.transfer_plan import TransferPlan
from serving_core.clock import MonotonicClock
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.ids import PageId
from serving_core.transfer_ticket import HandoffCommit, TransferTicket
from tests.contract.page_path import (
    LAYOUT,
    MAX_SEGMENT_BYTES,
    NUM_PROMPT_TOKENS,
    PATIENCE_S,
    PagePath,
    PatternSource,
    RecordingSink,
    make_ticket,
    until,
)

NUM_PAGES = LAYOUT.num_pages_for(NUM_PROMPT_TOKENS)


class SinkCommitter:
    """Acknowledges what the sink holds completely, after as many lost answers as asked for."""

    def __init__(self, sink: RecordingSink) -> None:
        self._sink = sink
        self.commits: list[HandoffCommit] = []
        self.num_lost_answers = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def commit(self, commit: HandoffCommit) -> None:
        self.commits.append(commit)
        await self.gate.wait()
        ticket = make_ticket(attempt=commit.attempt, reservation_id=commit.reservation_id)
        if not self._sink.is_complete(ticket):
            raise Refused(RefusalCode.INCOMPLETE, "Not every byte is there.")
        assert commit.num_bytes_sent == self._sink.num_bytes_received(ticket)
        if len(self.commits) <= self.num_lost_answers:
            raise WorkerLost("The answer was lost.")


def make_handoff(path: PagePath, ticket: TransferTicket, committer: SinkCommitter) -> OutgoingHandoff:
    return OutgoingHandoff(
        ticket=ticket,
        plan=TransferPlan.between(LAYOUT, ticket.layout),
        source=PatternSource(),
        transport=path.transport,
        committer=committer,
        clock=MonotonicClock(),
        backoff=Backoff(first_s=0.01, max_s=0.05),
        max_segment_bytes=MAX_SEGMENT_BYTES,
        max_broken_s=PATIENCE_S,
    )


def on_engine_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def offer(handoff: OutgoingHandoff, *ordinals: int) -> None:
    on_engine_thread(lambda: handoff.offer([(ordinal, PageId(ordinal)) for ordinal in ordinals]))


def finish(handoff: OutgoingHandoff) -> None:
    on_engine_thread(lambda: handoff.finish(42, None))


async def test_life_of_a_handoff(path: PagePath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    committer = SinkCommitter(path.sink)
    # 1. It waits for pages.
    handoff = make_handoff(path, ticket, committer)
    run = asyncio.create_task(handoff.run())
    await until(lambda: handoff.state is HandoffState.AWAITING_PAGES)
    # 2. Two pages go while the rest is still being computed.
    offer(handoff, 0, 1)
    await until(lambda: path.sink.num_bytes_received(ticket) == 2 * LAYOUT.page_bytes)
    await until(lambda: handoff.state is HandoffState.AWAITING_PAGES)
    assert not committer.commits
    # 3. The last pages and the token come; the decode worker takes its time with the commit.
    committer.gate.clear()
    offer(handoff, *range(2, NUM_PAGES))
    finish(handoff)
    await until(lambda: handoff.state is HandoffState.AWAITING_ACKNOWLEDGEMENT)
    exposed_s = handoff.exposed_s
    assert exposed_s is None
    # 4. It acknowledges.
    committer.gate.set()
    await run
    assert handoff.state is HandoffState.COMMITTED
    path.sink.assert_pages_equal_source(ticket)
    assert [(commit.token_id, commit.attempt) for commit in committer.commits] == [(42, 1)]
    assert handoff.num_bytes_sent == NUM_PAGES * LAYOUT.page_bytes
    assert handoff.num_broken_ways == 0
    assert handoff.transfer_s > 0
    assert handoff.exposed_s is not None
    assert handoff.hidden_fraction is not None
    # 5. A late cancel is a no-op.
    handoff.cancel()
    await asyncio.sleep(0.01)
    assert handoff.state is HandoffState.COMMITTED


async def test_a_way_that_breaks_between_and_during_pages_is_opened_again(impatient_path: PagePath) -> None:
    path = impatient_path
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    committer = SinkCommitter(path.sink)
    handoff = make_handoff(path, ticket, committer)
    run = asyncio.create_task(handoff.run())
    # 1. A page is accepted, the receiver goes, the next page meets a broken way.
    offer(handoff, 0)
    await until(lambda: path.sink.num_bytes_received(ticket) == LAYOUT.page_bytes)
    await path.break_way()
    offer(handoff, 1)
    await until(lambda: handoff.num_broken_ways >= 2)
    # 2. It comes back with its pages.
    await path.mend_way()
    await until(lambda: path.sink.num_bytes_received(ticket) == 2 * LAYOUT.page_bytes)
    # 3. A stall in the middle of a page is a broken way as well.
    path.sink.gate.clear()
    num_broken_ways = handoff.num_broken_ways
    offer(handoff, *range(2, NUM_PAGES))
    await until(lambda: handoff.num_broken_ways > num_broken_ways)
    path.sink.gate.set()
    # 4. Two answers to the commit are lost; the third arrives.
    committer.num_lost_answers = 2
    finish(handoff)
    await run
    assert len(committer.commits) == 3
    assert len(set(committer.commits)) == 1
    path.sink.assert_pages_equal_source(ticket)


async def test_a_refused_push_ends_it(path: PagePath) -> None:
    path.sink.reserve(make_ticket(attempt=2))
    committer = SinkCommitter(path.sink)
    handoff = make_handoff(path, make_ticket(attempt=1, address=path.address), committer)
    offer(handoff, *range(NUM_PAGES))
    finish(handoff)
    with pytest.raises(Refused) as refused:
        await handoff.run()
    assert refused.value.code is RefusalCode.STALE_ATTEMPT
    assert handoff.state is HandoffState.REFUSED
    assert not committer.commits
    path.sink.assert_untouched(make_ticket(attempt=2))


async def test_a_refused_commit_ends_it(path: PagePath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    handoff = make_handoff(path, ticket, SinkCommitter(RecordingSinkThatForgot(ticket)))
    offer(handoff, *range(NUM_PAGES))
    finish(handoff)
    with pytest.raises(Refused) as refused:
        await handoff.run()
    assert refused.value.code is RefusalCode.INCOMPLETE
    assert handoff.state is HandoffState.REFUSED


class RecordingSinkThatForgot(RecordingSink):
    def __init__(self, ticket: TransferTicket) -> None:
        super().__init__()
        self.reserve(ticket)


STATES_THAT_WAIT = [state for state in HandoffState if not state.is_final]


@pytest.mark.parametrize("state", STATES_THAT_WAIT)
async def test_cancel_ends_it_at_once_in_every_state(path: PagePath, state: HandoffState) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    committer = SinkCommitter(path.sink)
    handoff = make_handoff(path, ticket, committer)
    run = asyncio.create_task(handoff.run())
    # 1. Bring it into the state.
    match state:
        case HandoffState.AWAITING_ACCEPTANCE:
            path.sink.gate.clear()
        case HandoffState.AWAITING_WAY:
            await path.break_way()
        case HandoffState.AWAITING_ACKNOWLEDGEMENT:
            committer.gate.clear()
        case _:
            pass
    if state is not HandoffState.AWAITING_PAGES:
        offer(handoff, *range(NUM_PAGES))
        finish(handoff)
    await until(lambda: handoff.state is state)
    # 2. Cancel it from another thread, twice.
    started_at = time.monotonic()
    on_engine_thread(handoff.cancel)
    on_engine_thread(handoff.cancel)
    with pytest.raises(asyncio.CancelledError):
        await run
    assert time.monotonic() - started_at < PATIENCE_S / 4
    assert handoff.state is HandoffState.CANCELLED
    assert handoff.exposed_s is None
    # 3. Offering and finishing afterwards is a no-op; the fixture then finds no task left.
    if state is HandoffState.AWAITING_PAGES:
        offer(handoff, *range(NUM_PAGES))
        finish(handoff)
        await asyncio.sleep(0)
        assert not committer.commits
    if state is HandoffState.AWAITING_WAY:
        await path.mend_way()


async def test_cancel_before_run_sends_nothing(path: PagePath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    handoff = make_handoff(path, ticket, SinkCommitter(path.sink))
    offer(handoff, 0)
    on_engine_thread(handoff.cancel)
    await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await handoff.run()
    path.sink.assert_untouched(ticket)


async def test_a_reservation_that_ends_while_pages_are_pushed_refuses_the_rest(path: PagePath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    handoff = make_handoff(path, ticket, SinkCommitter(path.sink))
    run = asyncio.create_task(handoff.run())
    offer(handoff, 0)
    await until(lambda: path.sink.num_bytes_received(ticket) == LAYOUT.page_bytes)
    renewed = make_ticket(attempt=2)
    path.sink.reserve(renewed)
    path.sink.num_copies = 0
    offer(handoff, 1)
    with pytest.raises(Refused) as refused:
        await run
    assert refused.value.code is RefusalCode.STALE_ATTEMPT
    path.sink.assert_untouched(renewed)
