"""Worker ids through their states, and the legs on one worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.background_tasks import BackgroundTasks
from router.leg import Leg
from router.registered_worker import RegisteredWorker
from router.worker_directory import WorkerDirectory, WorkerState
from serving_core.clock import ManualClock
from serving_core.errors import Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import SequenceKey, WorkerId
from serving_core.page_demand import PageDemand
from serving_core.page_state import PagesSnapshot
from serving_core.token_event import SequenceEvent, TokenEvent
from serving_core.transfer_ticket import TransferTicket
from serving_core.worker_status import PhaseName, Role, WorkerHello
from tests.unit.router.fake_worker import make_hello, make_key, make_status

PREFILL, DECODE = PhaseName.PREFILL, PhaseName.DECODE
MAX_SILENCE_S = 0.3


class NoCalls:
    """A connection that nobody uses; counts how often it is closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    async def reserve(self, request: GenerateRequest, attempt: int, *, num_evictions: int) -> TransferTicket:
        raise AssertionError

    async def start(self, request: GenerateRequest, ticket: TransferTicket) -> None:
        raise AssertionError

    async def release(self, phase: PhaseName, key: SequenceKey, attempt: int) -> None:
        raise AssertionError

    async def pages(self, *, is_summary: bool, timeout_s: float) -> PagesSnapshot:
        raise AssertionError

    async def close(self) -> None:
        self.num_closed += 1


class Listener:
    """Writes down what a leg is told."""

    def __init__(self) -> None:
        self.events: list[SequenceEvent] = []
        self.lost: list[Leg] = []

    def on_event(self, leg: Leg, event: SequenceEvent) -> None:
        self.events.append(event)

    def on_worker_lost(self, leg: Leg) -> None:
        self.lost.append(leg)


class Setting:
    """A directory on a clock of the test's own."""

    def __init__(self, *, come_cold: bool = False) -> None:
        self.clock = ManualClock()
        self.tasks = BackgroundTasks()
        self.calls: list[NoCalls] = []
        self.directory = WorkerDirectory(
            clock=self.clock,
            dead_after_s=3.0,
            connect=self._connect,
            tasks=self.tasks,
            come_cold=come_cold,
            max_hold_s=0.05,
            max_silence_s=MAX_SILENCE_S,
        )

    def _connect(self, hello: WorkerHello) -> NoCalls:
        self.calls.append(NoCalls())
        return self.calls[-1]

    def register_ready(self, hello: WorkerHello) -> RegisteredWorker:
        worker = self.directory.register(hello)
        worker.take_status(make_status())
        return worker

    def states(self) -> dict[str, str]:
        return {entry.worker_id: self.directory.state_of(entry).value for entry in self.directory.entries()}

    def add_leg(
        self,
        worker: RegisteredWorker,
        phase: PhaseName,
        *,
        request_id: str = "r",
        demand: PageDemand | None = None,
        num_prompt: int = 0,
    ) -> tuple[Leg, Listener]:
        listener = Listener()
        leg = Leg(
            worker=worker,
            phase=phase,
            key=make_key(request_id),
            listener=listener,
            demand=demand,
            num_prefill_tokens=num_prompt,
        )
        return worker.attach(leg), listener


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    setting = Setting()
    yield setting
    setting.directory.close()
    await setting.tasks.join()


async def test_states_of_a_worker_id(setting: Setting) -> None:
    directory = setting.directory
    # 1. expected
    directory.expect(WorkerId("decode-0"), Role.DECODE)
    assert setting.states() == {"decode-0": "starting"}
    assert directory.missing_phases() == ["prefill", "decode"]
    # 2. registered, and known to run by its first status
    worker = directory.register(make_hello("decode-0", {DECODE}))
    assert setting.states() == {"decode-0": "suspect"}
    assert directory.missing_phases() == ["prefill", "decode"]
    worker.take_status(make_status())
    assert setting.states() == {"decode-0": "ready"}
    assert directory.missing_phases() == ["prefill"]
    # 3. expecting it again changes nothing while it lives
    directory.expect(WorkerId("decode-0"), Role.DECODE)
    assert setting.states() == {"decode-0": "ready"}
    # 4. draining and back
    worker.take_status(make_status(is_draining=True))
    assert setting.states() == {"decode-0": "draining"}
    worker.take_status(make_status())
    assert setting.states() == {"decode-0": "ready"}
    # 5. the stream ends; after a while it counts as dead
    directory.lose(worker)
    assert setting.states() == {"decode-0": "suspect"}
    setting.clock.advance(3.1)
    assert setting.states() == {"decode-0": "dead"}
    # 6. a new incarnation is as good as the first
    setting.register_ready(make_hello("decode-0", {DECODE}, incarnation="second"))
    assert setting.states() == {"decode-0": "ready"}
    # 7. the process is known to be gone, and a new one is started
    directory.mark_dead(WorkerId("decode-0"))
    assert setting.states() == {"decode-0": "dead"}
    directory.expect(WorkerId("decode-0"), Role.DECODE)
    assert setting.states() == {"decode-0": "starting"}
    directory.mark_dead(WorkerId("nobody"))
    assert setting.states() == {"decode-0": "starting"}


async def test_a_process_that_comes_cold_serves_once_it_is_warm() -> None:
    setting = Setting(come_cold=True)
    directory = setting.directory
    # 1. ready in all but its caches
    worker = setting.register_ready(make_hello("both-0", {PREFILL, DECODE}))
    assert setting.states() == {"both-0": "starting"}
    assert directory.missing_phases() == ["prefill", "decode"]
    assert (directory.connected(), directory.serving()) == ([worker], [])
    worker.become_warm()
    assert setting.states() == {"both-0": "ready"}
    assert directory.missing_phases() == []
    assert directory.serving() == [worker]
    # 2. a link that broke changes nothing about the process, another process is cold
    setting.register_ready(make_hello("both-0", {PREFILL, DECODE}))
    assert setting.states() == {"both-0": "ready"}
    setting.register_ready(make_hello("both-0", {PREFILL, DECODE}, incarnation="second"))
    assert setting.states() == {"both-0": "starting"}
    # 3. one that drains is not waited for
    (again,) = directory.connected()
    again.take_status(make_status(is_draining=True))
    assert setting.states() == {"both-0": "draining"}
    directory.close()
    await setting.tasks.join()


async def test_a_worker_that_was_wrongly_taken_for_gone_returns(setting: Setting) -> None:
    directory = setting.directory
    # 1. its stream ends, and its process is said to be gone
    directory.lose(directory.register(make_hello("decode-0", {DECODE}, incarnation="first")))
    directory.expect(WorkerId("decode-0"), Role.DECODE)
    assert setting.states() == {"decode-0": "starting"}
    # 2. it lives and dials again
    directory.register(make_hello("decode-0", {DECODE}, incarnation="first")).take_status(make_status())
    assert setting.states() == {"decode-0": "ready"}
    # 3. once a new one has taken its place it cannot
    directory.register(make_hello("decode-0", {DECODE}, incarnation="second"))
    with pytest.raises(Refused, match="Incarnation first of decode-0 has been replaced"):
        directory.register(make_hello("decode-0", {DECODE}, incarnation="first"))


async def test_new_incarnation_replaces_the_old_one(setting: Setting) -> None:
    old = setting.directory.register(make_hello("decode-0", {DECODE}, incarnation="old"))
    leg, listener = setting.add_leg(old, DECODE)
    new = setting.directory.register(make_hello("decode-0", {DECODE}, incarnation="new"))
    assert listener.lost == [leg]
    assert old.gone.done()
    assert setting.directory.connected() == [new]
    await setting.tasks.join()
    assert [calls.num_closed for calls in setting.calls] == [1, 0]
    with pytest.raises(Refused, match="Incarnation old of decode-0 has been replaced"):
        setting.directory.register(make_hello("decode-0", {DECODE}, incarnation="old"))
    assert setting.directory.connected() == [new]


async def test_the_same_incarnation_may_dial_again(setting: Setting) -> None:
    before = setting.directory.register(make_hello("decode-0", {DECODE}))
    setting.directory.lose(before)
    after = setting.directory.register(make_hello("decode-0", {DECODE}))
    assert setting.directory.connected() == [after]


async def test_room_is_what_the_legs_leave(setting: Setting) -> None:
    worker = setting.directory.register(make_hello("both-0", {PREFILL, DECODE}, num_pages=10))
    decode, _ = setting.add_leg(worker, DECODE, demand=PageDemand(num_tokens=5, max_num_tokens=13))
    prefill, _ = setting.add_leg(worker, PREFILL, num_prompt=5)
    load = worker.load()
    assert (load.num_free_pages, load.num_running, load.num_queued_prefill_tokens) == (7, 1, 5)
    prefill.end_prefill()
    assert worker.load().num_queued_prefill_tokens == 0
    # a sequence grows, beyond the pool if need be, and gives all of it back once
    worker.rebook(decode, PageDemand(num_tokens=9, max_num_tokens=13))
    assert worker.load().num_free_pages == 6
    worker.rebook(decode, PageDemand(num_tokens=50, max_num_tokens=50))
    assert worker.load().num_free_pages == -3
    for leg in (decode, prefill, decode):
        leg.detach()
    worker.rebook(decode, PageDemand(num_tokens=9, max_num_tokens=13))
    load = worker.load()
    assert (load.num_free_pages, load.num_running, worker.num_legs) == (10, 0, 0)


async def test_only_wanted_legs_are_renewed(setting: Setting) -> None:
    worker = setting.directory.register(make_hello("prefill-0", {PREFILL}))
    handed_over, _ = setting.add_leg(worker, PREFILL, request_id="a")
    setting.add_leg(worker, PREFILL, request_id="b")
    handed_over.is_wanted = False
    assert worker.wanted_keys() == {make_key("b")}


async def test_a_hold_ends_with_the_next_change(setting: Setting) -> None:
    worker = setting.register_ready(make_hello("decode-0", {DECODE}))
    worker.hold(make_key("r"))
    assert not worker.load().can_take_work
    assert worker.is_ready
    worker.take_status(make_status())
    assert worker.load().can_take_work
    # the end of a sequence is a change, if the worker had taken it in; that of the one it turned away is none
    refused, _ = setting.add_leg(worker, DECODE, request_id="refused")
    unasked, _ = setting.add_leg(worker, DECODE, request_id="unasked")
    accepted, _ = setting.add_leg(worker, DECODE, request_id="accepted")
    refused.is_accepted = accepted.is_accepted = True
    worker.hold(refused.key)
    refused.detach()
    unasked.detach()
    assert not worker.load().can_take_work
    accepted.detach()
    assert worker.load().can_take_work


async def test_a_hold_ends_by_itself_and_tells_so(setting: Setting) -> None:
    worker = setting.register_ready(make_hello("decode-0", {DECODE}))
    worker.hold(make_key("r"))
    async with asyncio.timeout(2):
        await setting.directory.wait_until(lambda: worker.load().can_take_work)


async def test_a_lost_worker_leaves_no_hold_behind(setting: Setting) -> None:
    worker = setting.directory.register(make_hello("decode-0", {DECODE}))
    worker.hold(make_key("r"))
    setting.directory.lose(worker)
    worker.hold(make_key("r"))
    changes: list[None] = []
    setting.directory.subscribe(lambda: changes.append(None))
    await asyncio.sleep(0.1)
    assert changes == []


async def test_events_reach_their_leg_only(setting: Setting) -> None:
    worker = setting.directory.register(make_hello("decode-0", {DECODE}))
    _, here = setting.add_leg(worker, DECODE, request_id="a")
    gone, elsewhere = setting.add_leg(worker, DECODE, request_id="b")
    gone.detach()
    for request_id in ("a", "b", "c"):
        worker.take_event(TokenEvent(key=make_key(request_id), attempt=1, index=0, token_id=1))
    assert len(here.events) == 1
    assert elsewhere.events == []


async def test_losing_a_worker_tells_every_leg_once(setting: Setting) -> None:
    worker = setting.directory.register(make_hello("decode-0", {DECODE}))
    legs = [setting.add_leg(worker, DECODE, request_id=name) for name in "abc"]
    setting.directory.lose(worker)
    setting.directory.lose(worker)
    assert [listener.lost for _, listener in legs] == [[leg] for leg, _ in legs]
    assert worker.num_legs == 0


async def test_silence_is_a_loss(setting: Setting) -> None:
    loop = asyncio.get_running_loop()
    worker = setting.register_ready(make_hello("decode-0", {DECODE}))
    leg, listener = setting.add_leg(worker, DECODE)
    # 1. a status, and nothing else, shows that its engine runs
    for _ in range(3):
        await asyncio.sleep(0.5 * MAX_SILENCE_S)
        worker.take_status(make_status())
        worker.take_event(TokenEvent(key=leg.key, attempt=1, index=0, token_id=1))
    last_status_at = loop.time()
    assert listener.lost == []
    # 2. silence
    async with asyncio.timeout(10 * MAX_SILENCE_S):
        await worker.gone
    assert loop.time() - last_status_at > 0.9 * MAX_SILENCE_S
    assert listener.lost == [leg]
    assert setting.states() == {"decode-0": "suspect"}
    # 3. it dials again, but gets no work before a status; none of the old link counts
    again = setting.directory.register(make_hello("decode-0", {DECODE}))
    worker.take_status(make_status())
    assert setting.states() == {"decode-0": "suspect"}
    assert not again.load().can_take_work
    again.take_status(make_status())
    assert setting.states() == {"decode-0": "ready"}


async def test_wait_until_ends_by_a_change(setting: Setting) -> None:
    waiting = asyncio.create_task(setting.directory.wait_until(lambda: not setting.directory.missing_phases()))
    setting.register_ready(make_hello("prefill-0", {PREFILL}))
    await asyncio.sleep(0)
    assert not waiting.done()
    setting.register_ready(make_hello("decode-0", {DECODE}))
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(setting.directory.wait_until(lambda: True), 1)


def test_state_words() -> None:
    assert {state.value for state in WorkerState} == {"starting", "ready", "draining", "suspect", "dead"}
