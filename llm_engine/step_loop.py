"""The engine thread: drives the mounted phases step by step, and is the one place where their state may be touched.

One turn: 1. run the calls that other threads queued, in order; 2. let every phase release what no router named for one lease;
3. decode, then prefill: plan, run, apply. A step that the runner leaves under way is applied once the next one has begun, so
that the device does not wait for what the host does in between. When no phase had anything to run, the thread sleeps until the
next call or the next lease's end. Knows no sequence, no page and no transport.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from llm_engine.phase import Phase, Runner, StepUnderWay
from llm_engine.step_plan import StepPlan, StepResult
from serving_core.clock import Clock
from serving_core.errors import TwinpoolError, WorkerLost
from serving_core.worker_status import PhaseName

T = TypeVar("T")


class StepLoop:
    """Owns the engine thread from ``start`` to ``stop``.

    ``setup_thread`` runs first on that thread. ``on_crash`` gets whatever it, a phase or the runner raised, or a call that
    broke, on the engine thread, which then ends: the phases' state can no longer be trusted. The thread is a daemon, so that it
    never holds back a process that gives up.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        phases: Sequence[Phase],
        clock: Clock,
        on_crash: Callable[[BaseException], None],
        setup_thread: Callable[[], None] | None = None,
    ) -> None:
        self._runner = runner
        self._phases = sorted(phases, key=lambda phase: phase.name is not PhaseName.DECODE)
        self._clock = clock
        self._on_crash = on_crash
        self._setup_thread = setup_thread
        self._under_way: dict[PhaseName, tuple[StepPlan, StepUnderWay]] = {}
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()  # (run, reject), guarded by _changed
        self._is_closed = False  # guarded by _changed
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread. Once only."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step; calls not yet run fail with WorkerLost. True when the thread has ended within
        ``timeout_s``. May be repeated, and called from any thread but the engine's."""
        self._close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Run ``fn`` on the engine thread between two steps, in order of calling. Its result or exception goes to the future.

        A TwinpoolError is an answer and goes nowhere else; anything else means that ``fn`` broke halfway, and crashes the loop
        too, whether or not anybody looks at the future. After ``stop`` or a crash it fails with WorkerLost. Safe from any
        thread.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn()
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, TwinpoolError):
                    raise
            else:
                future.set_result(result)

        def reject() -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(WorkerLost("The engine of this worker has stopped."))

        with self._changed:
            is_closed = self._is_closed
            if not is_closed:
                self._calls.append((run, reject))
                self._changed.notify()
        if is_closed:
            reject()
        return future

    def _main(self) -> None:
        try:
            if self._setup_thread is not None:
                self._setup_thread()
            while self._turn():
                pass
        except BaseException as error:
            self._close()
            self._on_crash(error)

    def _turn(self) -> bool:
        """False once the loop is closed."""
        if not self._run_calls():
            return False
        lease_ends = [end for phase in self._phases if (end := phase.expire(self._clock.now())) is not None]
        has_stepped = [self._step(phase) for phase in self._phases]
        if not any(has_stepped):
            self._sleep(min(lease_ends, default=None))
        return True

    def _run_calls(self) -> bool:
        """Run those that wait by now, one by one, so that what a crash leaves is rejected. False once the loop is closed."""
        with self._changed:
            if self._is_closed:
                return False
            num_calls = len(self._calls)
        for _ in range(num_calls):
            with self._changed:
                if not self._calls:
                    return False  # closed meanwhile, which rejected the rest
                run, _ = self._calls.popleft()
            run()
        return True

    def _step(self, phase: Phase) -> bool:
        """False when there is nothing to compute and nothing under way."""
        plan = phase.plan()
        outcome = None if plan is None else self._runner.run(plan)
        before = self._under_way.pop(phase.name, None)
        if before is not None:
            phase.apply(before[0], before[1].wait())
        if plan is None or outcome is None:
            return before is not None
        if isinstance(outcome, StepResult):
            phase.apply(plan, outcome)
        else:
            self._under_way[phase.name] = (plan, outcome)
        return True

    def _sleep(self, until: float | None) -> None:
        timeout_s = None if until is None else max(0.0, until - self._clock.now())
        with self._changed:
            if not self._calls and not self._is_closed:
                self._changed.wait(timeout_s)

    def _close(self) -> None:
        with self._changed:
            self._is_closed = True
            calls = tuple(self._calls)
            self._calls.clear()
            self._changed.notify()
        for _, reject in calls:
            reject()
