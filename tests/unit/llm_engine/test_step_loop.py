from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial

import pytest

from llm_engine.phase import PhaseStatus, StepUnderWay
from llm_engine.step_loop import StepLoop
from llm_engine.step_plan import PlanRow, StepPlan, StepResult
from serving_core.clock import ManualClock, MonotonicClock
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.worker_status import PhaseName

KEY = SequenceKey(RequestId("r"))
WAIT_S = 10.0


@dataclass
class FakePhase:
    """Plans ``num_steps`` steps and writes down what was asked of it."""

    name: PhaseName
    log: list[str]
    num_steps: int = 0
    lease_end: float | None = None
    crash_in: str | None = None
    has_expired: threading.Event = field(default_factory=threading.Event)

    def expire(self, now: float) -> float | None:
        self._note("expire")
        if self.lease_end is not None and now >= self.lease_end:
            self.lease_end = None
            self.has_expired.set()
        return self.lease_end

    def plan(self) -> StepPlan | None:
        self._note("plan")
        if self.num_steps == 0:
            return None
        self.num_steps -= 1
        row = PlanRow(key=KEY, token_ids=(1,), start_position=0, page_ids=(PageId(0),), sample=None)
        return StepPlan(phase=self.name, rows=(row,))

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        assert plan.phase is self.name
        assert len(result.tokens) == 1
        self._note("apply")

    def renew(self, keys: frozenset[SequenceKey]) -> None: ...

    def abort(self, key: SequenceKey, attempt: int) -> None: ...

    def drain(self) -> None: ...

    def status(self) -> PhaseStatus:
        return PhaseStatus(num_running=0, num_waiting=0)

    def _note(self, verb: str) -> None:
        self.log.append(f"{self.name.value}.{verb}")
        if verb == self.crash_in:
            raise ZeroDivisionError(verb)


class FakeRunner:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def run(self, plan: StepPlan) -> StepResult | StepUnderWay:
        return self.result_of(plan)

    def result_of(self, plan: StepPlan) -> StepResult:
        self._log.append(f"run {plan.phase.value}")
        return StepResult(tokens=(None,) * len(plan.rows))


class Bench:
    """A loop over fakes, and everything that happened."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.prefill = FakePhase(PhaseName.PREFILL, self.log)
        self.decode = FakePhase(PhaseName.DECODE, self.log)
        self.runner = FakeRunner(self.log)
        self.crashes: list[BaseException] = []
        self.has_crashed = threading.Event()
        self.loops: list[StepLoop] = []

    def loop(self, *, setup_thread: Callable[[], None] | None = None, clock: ManualClock | None = None) -> StepLoop:
        loop = StepLoop(
            runner=self.runner,
            phases=[self.prefill, self.decode],
            clock=clock or MonotonicClock(),
            on_crash=self._crash,
            setup_thread=setup_thread,
        )
        self.loops.append(loop)
        return loop

    def _crash(self, error: BaseException) -> None:
        self.crashes.append(error)
        self.has_crashed.set()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for loop in bench.loops:
        assert loop.stop(WAIT_S)


def test_one_turn_in_order(bench: Bench) -> None:
    bench.prefill.num_steps = bench.decode.num_steps = 1
    loop = bench.loop(setup_thread=lambda: bench.log.append("setup"))
    calls = [loop.call(partial(bench.log.append, name)) for name in ("call a", "call b")]
    loop.start()
    for call in calls:
        call.result(WAIT_S)
    loop.call(lambda: None).result(WAIT_S)
    assert bench.log[:3] == ["setup", "call a", "call b"]
    assert sorted(bench.log[3:5]) == ["decode.expire", "prefill.expire"]
    decode, prefill = ["decode.plan", "run decode", "decode.apply"], ["prefill.plan", "run prefill", "prefill.apply"]
    assert bench.log[5:11] == decode + prefill


class AheadRunner(FakeRunner):
    """Leaves decode steps under way."""

    def run(self, plan: StepPlan) -> StepResult | StepUnderWay:
        result = self.result_of(plan)
        return result if plan.phase is PhaseName.PREFILL else UnderWay(result, self._log)


class UnderWay:
    def __init__(self, result: StepResult, log: list[str]) -> None:
        self._result = result
        self._log = log

    def wait(self) -> StepResult:
        self._log.append("wait")
        return self._result


def test_a_step_under_way_is_applied_once_the_next_has_begun(bench: Bench) -> None:
    bench.runner = AheadRunner(bench.log)
    bench.decode.num_steps, bench.prefill.num_steps = 2, 1
    loop = bench.loop()
    loop.start()
    for _ in range(4):
        loop.call(lambda: None).result(WAIT_S)
    steps = [entry for entry in bench.log if not entry.endswith("expire")]
    begun = ["decode.plan", "run decode"]
    prefill = ["prefill.plan", "run prefill", "prefill.apply"]
    applied = ["wait", "decode.apply"]
    assert steps[:12] == [*begun, *prefill, *begun, *applied, "prefill.plan", "decode.plan", *applied[:1]]
    assert steps[12] == "decode.apply"


def test_calls_run_on_the_engine_thread_and_answer(bench: Bench) -> None:
    loop = bench.loop()
    loop.start()
    assert loop.call(lambda: threading.current_thread().name).result(WAIT_S) == "engine"
    assert loop.call(threading.current_thread).result(WAIT_S).daemon


def test_an_idle_loop_sleeps_until_called(bench: Bench) -> None:
    loop = bench.loop()
    loop.start()
    loop.call(lambda: None).result(WAIT_S)
    num_turns = _turns_while_idle(bench)
    bench.prefill.num_steps = 3
    assert _turns_while_idle(bench) == num_turns, "nothing but a call or a lease wakes it"
    loop.call(lambda: None).result(WAIT_S)
    loop.call(lambda: None).result(WAIT_S)
    assert bench.prefill.num_steps < 3


def _turns_while_idle(bench: Bench) -> int:
    threading.Event().wait(0.05)
    return bench.log.count("decode.plan")


def test_an_idle_loop_wakes_for_the_end_of_a_lease(bench: Bench) -> None:
    bench.decode.lease_end = MonotonicClock().now() + 0.05
    bench.loop().start()
    assert bench.decode.has_expired.wait(WAIT_S)
    assert bench.log.count("decode.plan") < 10, "it does not poll"


def test_a_call_that_is_refused_harms_nobody(bench: Bench) -> None:
    loop = bench.loop()
    loop.start()

    def refuse() -> None:
        raise Refused(RefusalCode.DRAINING, "No.")

    with pytest.raises(Refused):
        loop.call(refuse).result(WAIT_S)
    assert loop.call(lambda: 7).result(WAIT_S) == 7
    assert not bench.crashes


def test_a_call_that_breaks_ends_the_loop_though_nobody_looks(bench: Bench) -> None:
    loop = bench.loop()

    def break_down() -> None:
        raise AssertionError("a page has two owners")

    # 1. Three calls wait for the same turn; the second breaks.
    before = loop.call(lambda: 7)
    broken = loop.call(break_down)
    behind = loop.call(lambda: 8)
    loop.start()
    # 2. The crash is told, whatever becomes of the future.
    assert bench.has_crashed.wait(WAIT_S)
    assert [str(error) for error in bench.crashes] == ["a page has two owners"]
    # 3. Every future ends.
    assert before.result(WAIT_S) == 7
    with pytest.raises(AssertionError, match="two owners"):
        broken.result(WAIT_S)
    for late in (behind, loop.call(lambda: 9)):
        with pytest.raises(WorkerLost):
            late.result(WAIT_S)


def test_a_cancelled_call_does_not_run(bench: Bench) -> None:
    loop = bench.loop()
    cancelled = loop.call(lambda: bench.log.append("ran"))
    assert cancelled.cancel()
    loop.start()
    loop.call(lambda: None).result(WAIT_S)
    assert "ran" not in bench.log
    with pytest.raises(CancelledError):
        cancelled.result(WAIT_S)


@pytest.mark.parametrize("verb", ["expire", "plan", "apply"])
def test_a_crash_in_a_phase_ends_the_loop(bench: Bench, verb: str) -> None:
    bench.decode.num_steps = 1
    bench.decode.crash_in = verb
    loop = bench.loop()
    loop.start()
    assert bench.has_crashed.wait(WAIT_S)
    assert [str(error) for error in bench.crashes] == [verb]
    with pytest.raises(WorkerLost):
        loop.call(lambda: None).result(WAIT_S)


def test_a_crash_in_setup_is_reported_too(bench: Bench) -> None:
    def fail() -> None:
        raise OSError("no such core")

    loop = bench.loop(setup_thread=fail)
    waiting = loop.call(lambda: None)
    loop.start()
    assert bench.has_crashed.wait(WAIT_S)
    with pytest.raises(WorkerLost):
        waiting.result(WAIT_S)
    assert bench.log == []


def test_stop_fails_what_still_waits(bench: Bench) -> None:
    loop = bench.loop()
    loop.start()
    is_inside, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        is_inside.set()
        may_go.wait(WAIT_S)

    held = loop.call(hold)
    assert is_inside.wait(WAIT_S)
    waiting: Future[None] = loop.call(lambda: None)
    assert not loop.stop(0.01), "the thread is inside a call"
    with pytest.raises(WorkerLost):
        waiting.result(WAIT_S)
    may_go.set()
    assert loop.stop(WAIT_S)
    held.result(0)
    with pytest.raises(WorkerLost):
        loop.call(lambda: None).result(0)
    assert not bench.crashes


def test_stop_before_start(bench: Bench) -> None:
    loop = bench.loop()
    waiting = loop.call(lambda: None)
    assert loop.stop(0.0)
    with pytest.raises(WorkerLost):
        waiting.result(0)
