"""One sequence's life across the pair. Owns its two legs, its attempts and the tokens on their way to the client.

1. wait for a turn; a placement books both legs                                  TURN
2. Reserve on the decode worker, which answers with a ticket                     RESERVATION
3. Start on the prefill worker, with that ticket                                 PREFILL_START
4. token 0 from prefill (the early copy), then all tokens from decode            TOKENS
5. finish reason, close or failure: both legs are released, once each            ENDED

An attempt that fails before more than token 0 is known leads back to 1 (nobody has been told yet) or to 2, at once, on whatever
workers are left; attempt + 1 fences the old one off. Knows neither text nor HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from router.admission import AdmissionQueue
from router.background_tasks import BackgroundTasks
from router.generation import Path
from router.leg_pair import LegPair
from router.placement import NotNow
from router.registered_worker import Leg, RegisteredWorker
from router.token_log import TokenLog, Verdict
from serving_core.errors import InvalidRequest, RefusalCode, Refused, TwinpoolError, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.token_event import FailureKind, SequenceEvent, TokenEvent
from serving_core.worker_status import PhaseName

MAX_ATTEMPTS = 3

_COMES_BACK = frozenset({RefusalCode.RESOURCE_EXHAUSTED, RefusalCode.DRAINING})
"""Refusals that cost no attempt: the sequence stands in line again."""

_T = TypeVar("_T")


class LifeState(enum.Enum):
    """What a life is waiting for."""

    TURN = "turn"
    RESERVATION = "reservation"
    PREFILL_START = "prefill_start"
    TOKENS = "tokens"
    ENDED = "ended"


class DecisionCounter(Protocol):
    """Counts decisions by path and reason."""

    def count_decision(self, path: str, reason: str) -> None:
        """One more."""


class RequestLife:
    """One ``Generation``. Lives on the router's loop; ``_run`` is its only task, all but ``open`` and the iteration return at
    once."""

    path: Path
    reason: str

    def __init__(
        self,
        request: GenerateRequest,
        *,
        workers: Callable[[], Sequence[RegisteredWorker]],
        queue: AdmissionQueue,
        tasks: BackgroundTasks,
        decisions: DecisionCounter,
        on_end: Callable[[RequestLife], None],
    ) -> None:
        self.request = request
        self.state = LifeState.TURN
        self._queue = queue
        self._tasks = tasks
        self._legs = LegPair(request, workers=workers, tasks=tasks, listener=self)
        self._decisions = decisions
        self._on_end = on_end
        self._place_in_line = queue.draw_place()
        self._attempt = 0
        self._num_failures = 0
        self.is_open = False
        """Both legs have been on their way once: from then on nothing waits in line."""
        self._is_handed_over = False
        self._log = TokenLog()
        # At most max_tokens events: a slow client costs memory here and never holds up the link.
        self._tokens: asyncio.Queue[TokenEvent | TwinpoolError | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[TwinpoolError | None] = loop.create_future()
        self._setback: asyncio.Future[WorkerLost] = loop.create_future()
        self._runner: asyncio.Task[None] | None = None

    # -- the client's side ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin, and return when both legs are on their way. Raises what ended the life before that; cancelling closes it."""
        self._runner = self._tasks.spawn(self._run())
        try:
            error = await self._opened
        except asyncio.CancelledError:
            self.close()
            raise
        if error is not None:
            raise error

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        while (item := await self._tokens.get()) is not None:
            if isinstance(item, TwinpoolError):
                raise item
            yield item
            if item.finish_reason is not None:
                return

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Release both sides, whatever the state. Idempotent; the releases themselves run in the background."""
        self._end(None)

    def fail(self, error: TwinpoolError) -> None:
        """End with ``error`` for the client. A no-op once ended."""
        self._end(error)

    # -- the workers' side ------------------------------------------------------------------------------------------------

    def on_event(self, leg: Leg, event: SequenceEvent) -> None:
        if event.attempt != self._attempt or self._setback.done():
            return  # of an attempt that is fenced off, or that has failed already
        if isinstance(event, TokenEvent):
            self._on_token(leg, event)
        elif leg.phase is PhaseName.DECODE or not self._is_handed_over:
            self._set_back(
                f"{leg.worker.hello.worker_id} gave it up, {event.message}", can_retry=event.kind is not FailureKind.INTERNAL
            )

    def on_worker_lost(self, leg: Leg) -> None:
        self._legs.give_up(leg)
        if leg.phase is PhaseName.DECODE or not self._is_handed_over:
            self._set_back(f"{leg.phase.value} worker {leg.worker.hello.worker_id} was lost", can_retry=True)

    def _on_token(self, leg: Leg, event: TokenEvent) -> None:
        is_decodes_to_send = leg.phase is PhaseName.PREFILL and event.index > 0
        verdict = Verdict.WRONG if is_decodes_to_send else self._log.take(event)
        if verdict is Verdict.WRONG:
            seen = f"token {event.token_id} at index {event.index} where {len(self._log)} tokens were known"
            self._set_back(f"{leg.worker.hello.worker_id} sent {seen}", can_retry=False)
            return
        if (prefill := self._legs.prefill) is not None:
            prefill.end_prefill()
            # On the local path the early copy comes from the same worker: only what follows it is decode's word.
            is_early_copy = leg.worker is prefill.worker and event.index == 0 and verdict is Verdict.NEXT
            if leg.phase is PhaseName.DECODE and not is_early_copy:
                self._is_handed_over = True
                prefill.is_wanted = False
        if verdict is Verdict.NEXT:
            self._tokens.put_nowait(event)
            if event.finish_reason is not None:
                self._end(None)

    def _set_back(self, message: str, *, can_retry: bool) -> None:
        """This attempt is over; nothing more is taken from it."""
        if not can_retry:
            self.fail(WorkerLost(f"The sequence was lost: {message}."))
        elif not self._setback.done():
            self._setback.set_result(WorkerLost(message))

    # -- the life itself --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._book_through_line()
            while True:
                setback: Refused | WorkerLost
                try:
                    await self._start_attempt()
                except (Refused, WorkerLost) as error:
                    setback = error
                else:
                    self._tell_open(None)
                    setback = await self._setback
                self._check_can_go_on(setback)
                if self.is_open:
                    self._book_again(setback)
                else:
                    await self._book_through_line()
        except TwinpoolError as error:
            self.fail(error)
        except asyncio.CancelledError:
            self.close()  # ended already, or the loop is going down
        except Exception as error:
            self.fail(WorkerLost(f"The router failed: {error!r}."))
            raise

    async def _book_through_line(self) -> None:
        self._legs.give_up_both()
        self.state = LifeState.TURN
        await self._queue.wait_turn(self._place_in_line, self._try_book, is_returning=self._attempt > 0)

    def _try_book(self) -> bool:
        if self.state is LifeState.ENDED:
            return True  # closed a moment ago: leave the line with nothing taken
        placement = self._legs.take()
        if isinstance(placement, NotNow):
            return False
        self.path, self.reason = placement.path, placement.reason.value
        self._decisions.count_decision(self.path.value, self.reason)
        return True

    def _book_again(self, setback: Refused | WorkerLost) -> None:
        """The next attempt of a sequence that the client has been told of: at once, or never."""
        placement = self._legs.take_again()
        if isinstance(placement, NotNow):
            raise self._lost(setback, f"another attempt has nowhere to go: {placement.value}")
        self._decisions.count_decision(placement.path.value, placement.reason.value)

    async def _start_attempt(self) -> None:
        """Reserve, then Start, under the next attempt. Raises ``Refused`` or ``WorkerLost``."""
        decode, prefill = self._legs.decode, self._legs.prefill
        if decode is None or prefill is None:
            raise WorkerLost("a worker was lost before the sequence could be sent to it")
        self._attempt += 1
        self._setback = asyncio.get_running_loop().create_future()
        self._is_handed_over = False
        request = replace(self.request, output_token_ids=self._log.token_ids)
        self.state = LifeState.RESERVATION
        decode.attempt = self._attempt
        ticket = await self._ask(decode, decode.worker.calls.reserve(request, self._attempt))
        self.state = LifeState.PREFILL_START
        prefill.attempt = self._attempt
        await self._ask(prefill, prefill.worker.calls.start(request, ticket))
        self.state = LifeState.TOKENS

    async def _ask(self, leg: Leg, call: Coroutine[Any, Any, _T]) -> _T:
        """The answer to ``call``, unless the attempt fails first."""
        asking = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {asking, self._setback}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise self._setback.result()
        finally:
            if not asking.done():
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, TwinpoolError):
                    await asking
        try:
            return asking.result()
        except (Refused, WorkerLost):
            self._leave(leg)
            raise

    def _leave(self, leg: Leg) -> None:
        """The leg's worker declined or did not answer: look elsewhere until something changes there."""
        if self.is_open:
            self._legs.give_up(leg)
        else:
            self._legs.give_up_both()
        leg.worker.hold()  # last, since a leg that goes lifts a hold

    def _check_can_go_on(self, setback: Refused | WorkerLost) -> None:
        """Returns when another attempt may be made; raises what the client gets otherwise."""
        if isinstance(setback, Refused) and setback.code is RefusalCode.TOO_LARGE:
            raise InvalidRequest(f"The request is too large: {setback}.", param="max_tokens", code="exceeds_kv_cache")
        if isinstance(setback, Refused) and setback.code in _COMES_BACK and not self.is_open:
            return
        self._num_failures += 1
        if len(self._log) > 1:
            raise self._lost(setback, f"{len(self._log)} tokens are out")
        if self._num_failures >= MAX_ATTEMPTS:
            raise self._lost(setback, f"this was attempt {self._attempt}")

    def _lost(self, setback: Refused | WorkerLost, why_final: str) -> WorkerLost:
        return WorkerLost(f"The sequence was lost: {setback}; {why_final}.")

    def _tell_open(self, error: TwinpoolError | None) -> None:
        self.is_open = self.is_open or error is None
        if not self._opened.done():
            self._opened.set_result(error)

    # -- the end ----------------------------------------------------------------------------------------------------------

    def _end(self, error: TwinpoolError | None) -> None:
        if self.state is LifeState.ENDED:
            return
        self.state = LifeState.ENDED
        self._on_end(self)
        self._tokens.put_nowait(error)  # behind the tokens: None ends an iteration that nothing else would end
        self._legs.give_up_both()
        self._tell_open(error)
        if self._runner is not None and self._runner is not asyncio.current_task():
            self._runner.cancel()
