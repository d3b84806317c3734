"""Which workers exist, and in which state. Owns registered workers and their connections; decides nothing about sequences.

Life of a worker id: expected (starting) -> registered (suspect) -> first status (ready, or starting until it is warm) ->
draining -> stream gone, or no status for too long (suspect) -> away too long (dead). One that is away is starting again once
its process is known to be replaced. From every state a new incarnation leads back to registered.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from router.background_tasks import BackgroundTasks
from router.registered_worker import MAX_HOLD_S, MAX_SILENCE_S, RegisteredWorker
from router.worker_calls import WorkerCalls
from serving_core.clock import Clock
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import Incarnation, WorkerId
from serving_core.worker_status import PhaseName, Role, WorkerHello

_log = logging.getLogger(__name__)


class WorkerState(enum.Enum):
    """The words of ``/admin/workers``."""

    STARTING = "starting"
    """A process is being started for it, and has not registered, or does not have its warm prompts yet."""
    READY = "ready"
    """Takes new work."""
    DRAINING = "draining"
    """Takes no new work, finishes what it has."""
    SUSPECT = "suspect"
    """Its stream ended, or it has not told a status since it dialled; it may come back."""
    DEAD = "dead"
    """Suspect for too long, or known to be gone."""


@dataclass(slots=True, kw_only=True)
class WorkerEntry:
    """One place in a pool. ``worker`` is its latest registration, or None before the first."""

    worker_id: WorkerId
    role: Role
    worker: RegisteredWorker | None = None
    declared: WorkerState | None = None
    """What whoever starts the processes has told, starting or dead, since the latest registration."""
    retired: set[Incarnation] = field(default_factory=set)
    """Incarnations that a newer one has replaced; one of them that wakes up late is refused."""


class WorkerDirectory:
    """All workers this router knows. Runs on the router's loop; nothing here blocks. Where processes ``come_cold``, they take
    requests once somebody has warmed them."""

    def __init__(
        self,
        *,
        clock: Clock,
        dead_after_s: float,
        connect: Callable[[WorkerHello], WorkerCalls],
        tasks: BackgroundTasks,
        come_cold: bool = False,
        max_hold_s: float = MAX_HOLD_S,
        max_silence_s: float = MAX_SILENCE_S,
    ) -> None:
        self._clock = clock
        self._dead_after_s = dead_after_s
        self._max_hold_s = max_hold_s
        self._max_silence_s = max_silence_s
        self._connect = connect
        self._tasks = tasks
        self._come_cold = come_cold
        self._entries: dict[WorkerId, WorkerEntry] = {}
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """``on_change`` is called after every change of a worker's state or load."""
        self._subscribers.append(on_change)

    def expect(self, worker_id: WorkerId, role: Role) -> None:
        """A process for ``worker_id`` is being started. Shown as starting unless a live one is registered.

        Its latest incarnation may still return: that it is gone may be a rumour.
        """
        entry = self._entries.setdefault(worker_id, WorkerEntry(worker_id=worker_id, role=role))
        if entry.worker is None or entry.worker.lost_at is not None:
            entry.declared = WorkerState.STARTING
            self._tell_changed()

    def mark_dead(self, worker_id: WorkerId) -> None:
        """``worker_id`` is known not to serve; what it held is lost. Unknown ids are a no-op."""
        if (entry := self._entries.get(worker_id)) is not None:
            entry.declared = WorkerState.DEAD
            if entry.worker is not None:
                entry.worker.lose(self._clock.now())
            self._tell_changed()

    def register(self, hello: WorkerHello) -> RegisteredWorker:
        """Take a worker in, in place of what was registered under its id; what that one held is lost.

        Raises ``Refused`` for an incarnation that a newer one has replaced.
        """
        entry = self._entries.get(hello.worker_id)
        if entry is None:
            entry = self._entries[hello.worker_id] = WorkerEntry(worker_id=hello.worker_id, role=hello.role)
        if hello.incarnation in entry.retired:
            raise Refused(
                RefusalCode.STALE_ATTEMPT,
                f"Incarnation {hello.incarnation} of {hello.worker_id} has been replaced by a newer one and cannot return.",
            )
        before = entry.worker
        is_warm = not self._come_cold
        if before is not None and before.hello.incarnation == hello.incarnation:
            is_warm = before.is_warm  # the same process still has what it had
        entry.worker = RegisteredWorker(
            hello,
            calls=self._connect(hello),
            registered_at=self._clock.now(),
            on_change=self._tell_changed,
            on_silence=self._lose_silent,
            is_warm=is_warm,
            max_hold_s=self._max_hold_s,
            max_silence_s=self._max_silence_s,
        )
        entry.role = hello.role
        entry.declared = None
        if before is not None:
            if before.hello.incarnation != hello.incarnation:
                entry.retired.add(before.hello.incarnation)
            self._close(before)
        self._tell_changed()
        return entry.worker

    def lose(self, worker: RegisteredWorker) -> None:
        """The worker's stream ended. Idempotent."""
        worker.lose(self._clock.now())

    def entries(self) -> list[WorkerEntry]:
        """Every known place in order of its id."""
        return sorted(self._entries.values(), key=lambda entry: entry.worker_id)

    def registered(self) -> Iterator[RegisteredWorker]:
        """The latest registration of every place that had one, lost ones included."""
        return (entry.worker for entry in self.entries() if entry.worker is not None)

    def connected(self) -> list[RegisteredWorker]:
        """Workers whose stream stands, draining ones included."""
        return [worker for worker in self.registered() if worker.lost_at is None]

    def serving(self) -> list[RegisteredWorker]:
        """Those of them that requests may be placed on."""
        return [worker for worker in self.connected() if worker.is_warm]

    def state_of(self, entry: WorkerEntry) -> WorkerState:
        """The state at this moment."""
        worker = entry.worker
        if entry.declared is not None:
            return entry.declared
        if worker is None:
            return WorkerState.STARTING
        if worker.lost_at is not None:
            is_silent_too_long = self._clock.now() - worker.lost_at > self._dead_after_s
            return WorkerState.DEAD if is_silent_too_long else WorkerState.SUSPECT
        if worker.status is None:
            return WorkerState.SUSPECT
        if not worker.is_ready:
            return WorkerState.DRAINING
        return WorkerState.READY if worker.is_warm else WorkerState.STARTING

    def missing_phases(self) -> list[str]:
        """The phases that no ready worker has mounted; empty when requests can be served."""
        mounted = {phase for worker in self.serving() if worker.is_ready for phase in worker.hello.phases}
        return [phase.value for phase in PhaseName if phase not in mounted]

    async def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Return as soon as ``is_reached`` holds; it is asked after every change. The caller bounds the time."""
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ask() -> None:
            if not reached.done() and is_reached():
                reached.set_result(None)

        self.subscribe(ask)
        try:
            ask()
            await reached
        finally:
            self._subscribers.remove(ask)

    def close(self) -> None:
        """Every worker is lost and its connection given up; ``tasks`` holds the closing. Idempotent."""
        for worker in self.registered():
            self._close(worker)

    def _lose_silent(self, worker: RegisteredWorker) -> None:
        silence = f"it has told no status for {self._max_silence_s:g} s"
        _log.warning("%s counts as lost until it tells one again: %s", worker.hello.worker_id, silence)
        self.lose(worker)

    def _close(self, worker: RegisteredWorker) -> None:
        worker.lose(self._clock.now())
        self._tasks.spawn(worker.calls.close())

    def _tell_changed(self) -> None:
        for on_change in list(self._subscribers):
            on_change()
