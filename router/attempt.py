"""One attempt at a sequence: Reserve, Start, the hand-off, and its end. Knows neither the line nor the client.

1. ``start`` reserves on the decode worker and gives the ticket to the prefill worker
2. token 0 comes from prefill, and from decode: only decode's word makes it *handed over*
3. a setback ends it: ``over`` is done, and nothing more is taken from it
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from router.leg import Leg
from router.leg_pair import LegPair
from router.setback import Setback, SetbackKind, is_about_worker
from serving_core.errors import Refused, TwinpoolError, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.token_event import TokenEvent
from serving_core.worker_status import PhaseName

CONFIRMATION_S = 0.3
"""How long a decode worker may take to say that it has a sequence whose prefill worker is gone."""

_T = TypeVar("_T")


class Attempt:
    """``number`` fences off the attempts before it. ``request`` holds the tokens that were known when it began. ``legs`` are
    the sequence's; a worker that fails loses its own."""

    def __init__(self, number: int, request: GenerateRequest, *, num_evictions: int, legs: LegPair) -> None:
        self.number = number
        self.over: asyncio.Future[Setback] = asyncio.get_running_loop().create_future()
        self.is_started = False
        """Both workers have agreed."""
        self.is_handed_over = False
        self._request = request
        self._num_evictions = num_evictions
        self._legs = legs
        self._confirmation: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        return self.over.done()

    async def start(self) -> Setback | None:
        """Returns None when both workers have agreed, and what came in between otherwise."""
        try:
            await self._start()
        except (Refused, WorkerLost) as error:
            self._end(Setback.of(error))  # unless it was ended already, which is what raised the error
            return self.over.result()
        return None

    def on_token(self, leg: Leg, event: TokenEvent) -> None:
        """A token that fits came from ``leg``."""
        prefill = self._legs.prefill
        if prefill is not None:
            prefill.end_prefill()
        # On the local path the early copy comes from the same worker: only what follows it is decode's word.
        is_early_copy = event.index == 0 and prefill is not None and prefill.worker is leg.worker
        if leg.phase is PhaseName.DECODE and not is_early_copy:
            self.is_handed_over = True
            self.stop_timer()
            if prefill is not None:
                prefill.is_wanted = False

    def on_worker_lost(self, leg: Leg) -> None:
        """``leg`` is given up already."""
        message = f"{leg.phase.value} worker {leg.worker.hello.worker_id} was lost"
        if leg.phase is PhaseName.DECODE or not self.is_started:
            self.set_back(SetbackKind.FAILURE, message)
        elif not self.is_handed_over and not self.is_over and self._confirmation is None:
            # It may have committed with its last breath: then decode has all it needs, and will say so.
            loop = asyncio.get_running_loop()
            self._confirmation = loop.call_later(CONFIRMATION_S, self.set_back, SetbackKind.FAILURE, message)

    def set_back(self, kind: SetbackKind, message: str) -> None:
        """End it. A no-op when it is over."""
        self._end(Setback(kind=kind, message=message))

    def stop_timer(self) -> None:
        """Wait no longer for decode's word. Idempotent."""
        if self._confirmation is not None:
            self._confirmation.cancel()
            self._confirmation = None

    def _end(self, setback: Setback) -> None:
        self.stop_timer()
        if not self.over.done():
            self.over.set_result(setback)

    async def _start(self) -> None:
        decode, prefill = self._legs.decode, self._legs.prefill
        if decode is None or prefill is None:
            raise WorkerLost("A worker was lost before the sequence could be sent to it.")
        decode.attempt = self.number
        calls = decode.worker.calls
        ticket = await self._ask(decode, calls.reserve(self._request, self.number, num_evictions=self._num_evictions))
        prefill.attempt = self.number
        await self._ask(prefill, prefill.worker.calls.start(self._request, ticket))
        self.is_started = True

    async def _ask(self, leg: Leg, call: Coroutine[Any, Any, _T]) -> _T:
        """The answer to ``call``, unless the attempt is over first."""
        asking = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {asking, self.over}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise WorkerLost(self.over.result().message)
        finally:
            if not asking.done():
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, TwinpoolError):
                    await asking
        try:
            answer = asking.result()
        except (Refused, WorkerLost) as error:
            if Setback.of(error).kind is SetbackKind.FAILURE:
                self._legs.avoid(leg.worker)
            if is_about_worker(error):
                leg.worker.hold(leg.key)
            raise
        leg.is_accepted = True
        return answer
