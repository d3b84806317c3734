"""The hand-off's own decisions, with a transport and a committer that follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kv_transfer.backoff import Backoff
from kv_transfer.outgoing_handoff import HandoffState, OutgoingHandoff
from kv_transfer.page_transport import PageStream, Segment
from kv_transfer.transfer_plan import TransferPlan
from serving_core.clock import ManualClock
from serving_core.errors import WorkerLost
from serving_core.ids import Incarnation, PageId, RequestId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.token_event import TokenLogprobs
from serving_core.transfer_ticket import HandoffCommit, TransferTicket

LAYOUT = KVPageLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=4, dtype=KVDType.FLOAT32)  # 64 bytes
TICKET = TransferTicket(
    reservation_id=ReservationId("0" * 32),
    key=SequenceKey(RequestId("request")),
    attempt=3,
    decode_worker_id=WorkerId("decode-0"),
    decode_incarnation=Incarnation("first"),
    decode_address="127.0.0.1:1",
    layout=LAYOUT,
    num_prompt_tokens=13,
    num_cached_tokens=4,
    lease_s=6.0,
)  # pages 1, 2 and 3


MAX_BROKEN_S = 2.0


class OnePage:
    """A pool whose pages all look alike; keeps the memory, so that tests can tell a view from a copy."""

    def __init__(self) -> None:
        self.memory = bytes(range(64))

    def page_memory(self, page_id: PageId) -> memoryview:
        return memoryview(self.memory)


class ScriptedTransport:
    """Breaks at the numbered writes (from 1, over all streams), and before a clock tick of one second a write. Accepts at a
    flush, and at once when ``is_answering_early``."""

    name = "scripted"

    def __init__(self, clock: ManualClock, breaks_at: Sequence[int] = ()) -> None:
        self._clock = clock
        self._breaks_at = breaks_at
        self.num_open = 0
        self.num_opened = 0
        self.num_writes = 0
        self.num_accepted = 0
        self.is_answering_early = False
        self.written: list[Segment] = []

    @asynccontextmanager
    async def open(self, ticket: TransferTicket) -> AsyncIterator[PageStream]:
        assert ticket == TICKET
        self.num_opened += 1
        self.num_open += 1
        try:
            yield self
        finally:
            self.num_open -= 1

    async def close(self) -> None:
        assert self.num_open == 0

    async def write(self, segment: Segment) -> None:
        self.num_writes += 1
        if self.num_writes in self._breaks_at:
            raise WorkerLost("as the script says")
        self._clock.advance(1.0)
        self.written.append(segment)
        if self.is_answering_early:
            self.num_accepted = len(self.written)

    async def flush(self) -> None:
        self.num_accepted = len(self.written)


class ScriptedCommitter:
    def __init__(self, clock: ManualClock, num_lost: int = 0) -> None:
        self._clock = clock
        self._num_lost = num_lost
        self.commits: list[HandoffCommit] = []

    async def commit(self, commit: HandoffCommit) -> None:
        self.commits.append(commit)
        self._clock.advance(0.25)
        if len(self.commits) <= self._num_lost:
            raise WorkerLost("as the script says")


class House:
    """A hand-off with everything around it under the test's hand. Delays are recorded, and each costs ``seconds_per_delay``, or
    with None as many as were asked for."""

    def __init__(
        self,
        *,
        breaks_at: Sequence[int] = (),
        num_lost_commits: int = 0,
        max_segment_bytes: int = 48,
        seconds_per_delay: float | None = 0.0,
    ) -> None:
        self._seconds_per_delay = seconds_per_delay
        self.clock = ManualClock()
        self.source = OnePage()
        self.transport = ScriptedTransport(self.clock, breaks_at)
        self.committer = ScriptedCommitter(self.clock, num_lost_commits)
        self.delays: list[float] = []
        self.handoff = OutgoingHandoff(
            ticket=TICKET,
            plan=TransferPlan.between(LAYOUT, LAYOUT),
            source=self.source,
            transport=self.transport,
            committer=self.committer,
            clock=self.clock,
            backoff=Backoff(first_s=1.0, max_s=3.0),
            sleep=self._sleep,
            max_segment_bytes=max_segment_bytes,
            max_broken_s=MAX_BROKEN_S,
        )

    async def _sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.clock.advance(seconds if self._seconds_per_delay is None else self._seconds_per_delay)
        await asyncio.sleep(0)

    @property
    def written(self) -> list[tuple[int, int, int]]:
        return [(segment.page_ordinal, segment.offset, segment.payload.nbytes) for segment in self.transport.written]


PAGES = [(1, PageId(11)), (2, PageId(12)), (3, PageId(13))]
ALL = [(ordinal, offset, size) for ordinal in (1, 2, 3) for offset, size in ((0, 48), (48, 16))]


async def test_pages_are_cut_into_views_of_the_pool() -> None:
    house = House()
    house.handoff.offer(PAGES)
    house.handoff.finish(7, TokenLogprobs(logprob=-0.5), num_cached_tokens=2)
    await house.handoff.run()
    assert house.written == ALL
    assert all(segment.payload.obj is house.source.memory for segment in house.transport.written)
    assert {(segment.reservation_id, segment.attempt) for segment in house.transport.written} == {("0" * 32, 3)}
    assert house.committer.commits == [
        HandoffCommit(
            reservation_id=TICKET.reservation_id,
            key=TICKET.key,
            attempt=3,
            token_id=7,
            logprobs=TokenLogprobs(logprob=-0.5),
            num_bytes_sent=3 * 64,
            num_cached_tokens=2,
        )
    ]
    assert house.handoff.state is HandoffState.COMMITTED
    assert (house.transport.num_opened, house.transport.num_open) == (1, 0)


async def test_times_are_those_of_the_clock() -> None:
    house = House()
    house.handoff.offer(PAGES)
    house.clock.advance(100.0)  # nothing is under way yet
    house.handoff.finish(7, None)
    assert (house.handoff.exposed_s, house.handoff.hidden_fraction) == (None, None)
    await house.handoff.run()
    assert house.handoff.transfer_s == 6.25  # six segments of a second, and the commit
    assert house.handoff.exposed_s == 6.25
    assert house.handoff.hidden_fraction == 0.0
    assert house.handoff.num_bytes_sent == 3 * 64


async def test_what_goes_while_the_next_chunk_is_computed_is_hidden() -> None:
    house = House()
    run = asyncio.create_task(house.handoff.run())
    house.handoff.offer(PAGES[:2])
    await turn_the_loop()  # four segments leave during the last chunk
    house.clock.advance(100.0)
    house.handoff.offer(PAGES[2:])
    house.handoff.finish(7, None)
    await run
    assert house.handoff.transfer_s == 6.25
    assert house.handoff.exposed_s == 2.25
    assert house.handoff.hidden_fraction == 1 - 2.25 / 6.25


async def test_the_wait_after_a_broken_way_is_exposed_but_no_transfer() -> None:
    house = House(breaks_at=[5], seconds_per_delay=None)
    run = asyncio.create_task(house.handoff.run())
    house.handoff.offer(PAGES[:2])
    await turn_the_loop()
    house.handoff.offer(PAGES[2:])
    house.handoff.finish(7, None)
    await run
    assert house.delays == [1.0]
    assert house.handoff.transfer_s == 6.25
    assert house.handoff.exposed_s == 3.25
    assert house.handoff.hidden_fraction == 1 - 3.25 / 6.25


async def test_a_wait_longer_than_the_transfer_leaves_nothing_hidden() -> None:
    house = House(breaks_at=[1, 2], seconds_per_delay=None)
    house.handoff.offer(PAGES)
    house.handoff.finish(7, None)
    await house.handoff.run()
    assert house.handoff.exposed_s == 1.0 + 2.0 + 6.25
    assert house.handoff.hidden_fraction == 0.0


async def test_no_stream_is_opened_before_there_is_something_to_send() -> None:
    house = House()
    run = asyncio.create_task(house.handoff.run())
    await turn_the_loop()
    assert house.transport.num_opened == 0
    house.handoff.offer(PAGES[:1])
    await turn_the_loop()
    assert (house.transport.num_opened, house.written) == (1, ALL[:2])
    house.handoff.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert house.transport.num_open == 0


async def test_what_was_flushed_is_not_sent_again() -> None:
    house = House(breaks_at=[4])
    run = asyncio.create_task(house.handoff.run())
    house.handoff.offer(PAGES[:1])
    await turn_the_loop()
    house.handoff.offer(PAGES[1:])
    house.handoff.finish(7, None)
    await run
    assert house.written == [*ALL[:3], *ALL[2:]]
    assert house.transport.num_opened == 2
    assert house.handoff.num_bytes_sent == 3 * 64 + 48
    assert house.committer.commits[0].num_bytes_sent == 3 * 64


async def test_whole_pages_that_were_accepted_before_the_way_broke_are_not_sent_again() -> None:
    house = House(breaks_at=[4])
    house.transport.is_answering_early = True
    house.handoff.offer(PAGES)
    house.handoff.finish(7, None)
    await house.handoff.run()
    assert house.written == [*ALL[:3], *ALL[2:]]  # of the second page one piece had come, which is no page


async def test_a_way_that_stays_broken_ends_the_hand_off() -> None:
    house = House(breaks_at=range(1, 100), seconds_per_delay=0.5)
    house.handoff.offer(PAGES)
    with pytest.raises(WorkerLost, match="as the script says"):
        await house.handoff.run()
    assert house.handoff.state is HandoffState.LOST
    assert house.clock.now() == MAX_BROKEN_S
    assert house.transport.num_open == 0
    house.handoff.cancel()  # too late, and no error
    await turn_the_loop()
    assert house.handoff.state is HandoffState.LOST


async def test_a_way_that_breaks_again_and_again_is_not_lost_while_something_gets_through() -> None:
    house = House(breaks_at=[3, 4, 7, 8], seconds_per_delay=1.5)
    house.transport.is_answering_early = True
    house.handoff.offer(PAGES)
    house.handoff.finish(7, None)
    await house.handoff.run()
    assert house.handoff.state is HandoffState.COMMITTED


async def test_a_commit_that_nobody_answers_ends_the_hand_off() -> None:
    house = House(num_lost_commits=100, seconds_per_delay=1.0)
    house.handoff.offer(PAGES)
    house.handoff.finish(7, None)
    with pytest.raises(WorkerLost, match="as the script says"):
        await house.handoff.run()
    assert house.handoff.state is HandoffState.LOST
    assert len(house.committer.commits) == 3


async def test_delays_double_up_to_the_cap_and_start_over_after_progress() -> None:
    house = House(breaks_at=[1, 2, 3, 4, 7])
    run = asyncio.create_task(house.handoff.run())
    house.handoff.offer(PAGES[:1])
    await turn_the_loop()
    assert house.delays == [1.0, 2.0, 3.0, 3.0]
    house.handoff.offer(PAGES[1:])
    house.handoff.finish(7, None)
    await run
    assert house.delays == [1.0, 2.0, 3.0, 3.0, 1.0]
    assert house.handoff.num_broken_ways == 5


async def test_a_commit_without_an_answer_is_repeated_unchanged() -> None:
    house = House(num_lost_commits=3)
    house.handoff.offer(PAGES)
    house.handoff.finish(7, None)
    await house.handoff.run()
    assert len(house.committer.commits) == 4
    assert len(set(house.committer.commits)) == 1
    assert house.delays == [1.0, 2.0, 3.0]
    assert house.handoff.exposed_s == 7.0


async def test_the_commit_waits_for_finish_even_when_every_page_is_accepted() -> None:
    house = House()
    run = asyncio.create_task(house.handoff.run())
    house.handoff.offer(PAGES)
    await turn_the_loop()
    assert house.written == ALL
    assert house.handoff.state is HandoffState.AWAITING_PAGES
    house.handoff.finish(7, None)
    await run


async def test_cancelling_the_task_itself_ends_it_too() -> None:
    house = House()
    run = asyncio.create_task(house.handoff.run())
    await turn_the_loop()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert house.handoff.state is HandoffState.CANCELLED
    house.handoff.cancel()
    await turn_the_loop()


@pytest.mark.parametrize(
    "pages", [[(0, PageId(0))], [(2, PageId(0))], [(1, PageId(0)), (1, PageId(0))], [*PAGES, (4, PageId(0))]]
)
async def test_pages_out_of_turn_are_the_callers_mistake(pages: list[tuple[int, PageId]]) -> None:
    house = House()
    with pytest.raises(AssertionError):
        house.handoff.offer(pages)


async def test_finishing_before_the_last_page_is_the_callers_mistake() -> None:
    house = House()
    house.handoff.offer(PAGES[:2])
    with pytest.raises(AssertionError):
        house.handoff.finish(7, None)


def test_calls_after_the_loop_has_closed_are_no_ops() -> None:
    async def make() -> OutgoingHandoff:
        return House().handoff

    handoff = asyncio.run(make())
    handoff.offer(PAGES)
    handoff.finish(7, None)
    handoff.cancel()


async def turn_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
