"""One sequence's life across the pair. Owns its two legs, its attempts and the tokens on their way to the client.

1. wait for a turn; a placement books both legs                                  TURN
2. an attempt reserves on the decode worker and starts on the prefill worker     START
3. token 0 from prefill (the early copy), then all tokens from decode            TOKENS
4. finish reason, close or failure: both legs are released, once each            ENDED

An attempt that fails costs time only: after a PAUSE it leads back to 2 where a worker still holds something of the sequence,
else to 1 and its old place in line. The next attempt takes along the tokens that are known, and fences this one off. What was
evicted or turned away goes back to 1 at once. Knows neither text nor HTTP.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from router.attempt import Attempt
from router.background_tasks import BackgroundTasks
from router.generation import Path
from router.leg import Leg
from router.leg_pair import LegPair
from router.placement import NotNow, Placement, Reason
from router.registered_worker import RegisteredWorker
from router.retry_budget import RetryBudget, RetryPolicy
from router.setback import Setback, SetbackKind
from router.token_log import TokenLog, Verdict
from router.waiting_line import WaitingLine
from serving_core.errors import InvalidRequest, TwinpoolError, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.page_demand import PageDemand
from serving_core.token_event import FailureKind, SequenceEvent, SequenceEvicted, SequenceFailed, TokenEvent
from serving_core.worker_status import PhaseName


class LifeState(enum.Enum):
    """What a life is waiting for."""

    TURN = "turn"
    START = "start"
    TOKENS = "tokens"
    PAUSE = "pause"
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
        line: WaitingLine,
        tasks: BackgroundTasks,
        decisions: DecisionCounter,
        retry_policy: RetryPolicy,
        draw_jitter: Callable[[], float],
        on_end: Callable[[RequestLife], None],
    ) -> None:
        self.request = request
        self.state = LifeState.TURN
        self._line = line
        self._tasks = tasks
        self._legs = LegPair(request, workers=workers, tasks=tasks, listener=self)
        self._decisions = decisions
        self._on_end = on_end
        self._place_in_line = line.draw_place()
        self._budget = RetryBudget(retry_policy, draw_jitter)
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._num_evictions = 0
        self._why_again: Reason | None = None
        self.is_open = False
        """Both legs have been on their way once, and the client has been told so."""
        self._log = TokenLog()
        # At most max_tokens events: a slow client costs memory here and never holds up the link.
        self._tokens: asyncio.Queue[TokenEvent | TwinpoolError | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[TwinpoolError | None] = loop.create_future()
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
        attempt = self._attempt
        if attempt is None or event.attempt != attempt.number or attempt.is_over:
            return  # of an attempt that is fenced off, or that is over already
        if isinstance(event, TokenEvent):
            self._on_token(attempt, leg, event)
        elif isinstance(event, SequenceEvicted):
            attempt.set_back(SetbackKind.EVICTED, f"{leg.worker.hello.worker_id} gave its pages to older sequences")
        elif leg.phase is PhaseName.DECODE or not attempt.is_handed_over:
            self._on_failed(attempt, leg, event)

    def on_worker_lost(self, leg: Leg) -> None:
        self._legs.give_up(leg)
        if self._attempt is not None:
            self._attempt.on_worker_lost(leg)

    def _on_token(self, attempt: Attempt, leg: Leg, event: TokenEvent) -> None:
        is_decodes_to_send = leg.phase is PhaseName.PREFILL and event.index > 0
        verdict = Verdict.WRONG if is_decodes_to_send else self._log.take(event)
        if verdict is Verdict.WRONG:
            seen = f"token {event.token_id} at index {event.index} where {len(self._log)} tokens were known"
            self.fail(WorkerLost(f"The sequence was lost: {leg.worker.hello.worker_id} sent {seen}."))
            return
        attempt.on_token(leg, event)
        if verdict is Verdict.KNOWN:
            return
        self._budget.restore()
        self._legs.avoid_nobody()
        self._legs.rebook(self._demand())
        self._tokens.put_nowait(event)
        if event.finish_reason is not None:
            self._end(None)

    def _on_failed(self, attempt: Attempt, leg: Leg, event: SequenceFailed) -> None:
        message = f"{leg.worker.hello.worker_id} gave it up, {event.message.rstrip('.')}"
        if event.kind is FailureKind.INTERNAL:
            self.fail(WorkerLost(f"The sequence was lost: {message}."))
            return
        if leg.phase is PhaseName.DECODE:
            self._legs.avoid(leg.worker)  # it holds nothing any more, while prefill keeps what it has computed
        attempt.set_back(SetbackKind.FAILURE, message)

    # -- the life itself --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._book_through_line()
            while True:
                await self._book_after(await self._try())
        except TwinpoolError as error:
            self.fail(error)
        except asyncio.CancelledError:
            self.close()  # ended already, or the loop is going down
        except Exception as error:
            self.fail(WorkerLost(f"The router failed: {error!r}."))
            raise

    async def _try(self) -> Setback:
        """One attempt, until it is over; one that succeeds ends the life instead."""
        self._num_attempts += 1
        request = replace(self.request, output_token_ids=self._log.token_ids)
        self._attempt = Attempt(self._num_attempts, request, num_evictions=self._num_evictions, legs=self._legs)
        self.state = LifeState.START
        if (setback := await self._attempt.start()) is not None:
            return setback
        self.state = LifeState.TOKENS
        self._tell_open(None)
        setback = await self._attempt.over
        self._place_in_line = self._line.renew_place(self._place_in_line)
        return setback

    async def _book_after(self, setback: Setback) -> None:
        """Book room for the next attempt. Raises what the client gets when there must not be one, or no room in time."""
        match setback.kind:
            case SetbackKind.TOO_LARGE:
                raise InvalidRequest(
                    f"The request is too large: {setback.message}.", param="max_tokens", code="exceeds_kv_cache"
                )
            case SetbackKind.EVICTED:
                # Its leg stays until it is back in line, else its pages would go to somebody behind it.
                self._num_evictions += 1
                self._why_again = Reason.EVICTION
            case SetbackKind.FAILURE:
                self._why_again = Reason.RETRY
                await self._pause(setback)
                if self._legs.is_holding and self._has_booked(self._legs.take_again(self._demand())):
                    return
        await self._book_through_line()

    async def _pause(self, setback: Setback) -> None:
        if self._attempt is not None and self._attempt.is_handed_over:
            self._legs.give_up(self._legs.prefill)  # decode has it all, so nothing is left there
        pause_s = self._budget.spend()
        if pause_s is None:
            num_failures = self._budget.num_failures
            raise WorkerLost(
                f"The sequence was lost: {setback.message}; it was tried {num_failures} times without a new token."
            )
        if self._budget.num_failures > 1:
            self._legs.avoid_both()  # what is still held did not help the first time
        self.state = LifeState.PAUSE
        await asyncio.sleep(pause_s)

    async def _book_through_line(self) -> None:
        self.state = LifeState.TURN
        # Who waits holds nothing: two that wait for what the other holds would wait for ever.
        await self._line.wait_turn(
            self._place_in_line, self._try_book, is_returning=self._num_attempts > 0, let_go=self._legs.give_up_both
        )

    def _try_book(self) -> bool:
        if self.state is LifeState.ENDED:
            return True  # closed a moment ago: leave the line with nothing taken
        if self._legs.is_holding:
            return False  # about to let go
        return self._has_booked(self._legs.take(self._demand()))

    def _has_booked(self, placement: Placement | NotNow) -> bool:
        if isinstance(placement, NotNow):
            return False
        reason = self._why_again or placement.reason
        if not self.is_open:
            self.path, self.reason = placement.path, reason.value
        self._decisions.count_decision(placement.path.value, reason.value)
        return True

    def _demand(self) -> PageDemand:
        return PageDemand(
            num_tokens=self.request.num_prompt_tokens + len(self._log) + 1,
            max_num_tokens=self.request.max_total_tokens,
            num_evictions=self._num_evictions,
        )

    def _tell_open(self, error: TwinpoolError | None) -> None:
        self.is_open = self.is_open or error is None
        if not self._opened.done():
            self._opened.set_result(error)

    # -- the end ----------------------------------------------------------------------------------------------------------

    def _end(self, error: TwinpoolError | None) -> None:
        if self.state is LifeState.ENDED:
            return
        self.state = LifeState.ENDED
        if self._attempt is not None:
            self._attempt.stop_timer()
        self._on_end(self)
        self._tokens.put_nowait(error)  # behind the tokens: None ends an iteration that nothing else would end
        self._legs.give_up_both()
        self._tell_open(error)
        if self._runner is not None and self._runner is not asyncio.current_task():
            self._runner.cancel()
