"""What a router does so that a sequence goes on after an eviction or a dead worker: it keeps the tokens and asks again with all
of them as the log, under the next attempt. Without network and waiting line."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.token_event import SequenceEvent, SequenceEvicted, TokenEvent
from serving_core.transfer_ticket import TransferTicket
from tests.phases import DecodeSide, FakeHandoff, PrefillSide, deliver


@dataclass(eq=False)
class Journey:
    """One request on its way to the end."""

    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    attempt: int = 0
    num_evictions: int = 0
    is_under_way: bool = False
    is_finished: bool = False
    answers: list[TransferTicket | Refused] = field(default_factory=list)
    handoff: FakeHandoff | None = None

    @property
    def resumed(self) -> GenerateRequest:
        return replace(self.request, output_token_ids=tuple(self.token_ids))


class ResumingRouter:
    """Brings requests to their end over one prefill side and one decode side; the latter may be replaced when it has died.

    ``prefill`` beside ``decode`` on one pool means the local path. A turn of ``run`` is one step of each.
    """

    def __init__(self, prefill: PrefillSide, decode: DecodeSide) -> None:
        self.prefill = prefill
        self.decode = decode
        self.journeys: list[Journey] = []
        self._is_local = prefill.pool is decode.pool
        self._num_seen = {id(prefill.sink): 0, id(decode.sink): 0}

    @property
    def is_done(self) -> bool:
        return all(journey.is_finished for journey in self.journeys)

    def send(self, request: GenerateRequest) -> Journey:
        journey = Journey(request)
        self.journeys.append(journey)
        return journey

    def turn(self, *, is_delivering: bool = True) -> None:
        """One turn of everything; hand-offs stay under way unless ``is_delivering``."""
        for journey in self.journeys:
            if not journey.is_finished and not journey.is_under_way:
                self._ask(journey)
        for journey in self.journeys:
            self._start_granted(journey)
        self.decode.step()
        self._read_events()
        self.prefill.step()
        self.prefill.close_cancelled()
        if is_delivering:
            self._deliver()
        self._read_events()

    def run(self, max_turns: int) -> None:
        """Turn until every request has ended. Fails after ``max_turns``."""
        for _ in range(max_turns):
            if self.is_done:
                return
            self.turn()
        left = [(j.request.key, j.attempt, j.num_evictions, len(j.token_ids)) for j in self.journeys if not j.is_finished]
        raise AssertionError(f"after {max_turns} turns these have not ended: {left}")

    def replace_decode(self, decode: DecodeSide) -> None:
        """The decode worker is gone with all that it held; another takes its place."""
        self.decode = decode
        self._num_seen[id(decode.sink)] = 0
        for journey in self.journeys:
            if journey.is_under_way and not journey.is_finished:
                journey.is_under_way = False
            if journey.handoff is not None and not journey.handoff.has_ended:
                self.prefill.end_handoff(journey.handoff, WorkerLost("The decode worker is gone."))

    def _ask(self, journey: Journey) -> None:
        journey.attempt += 1
        journey.is_under_way = True
        journey.answers = self.decode.ask(journey.resumed, journey.attempt, num_evictions=journey.num_evictions)

    def _start_granted(self, journey: Journey) -> None:
        if not journey.answers or journey.is_finished:
            return
        (answer,) = journey.answers
        journey.answers = []
        if isinstance(answer, Refused):
            assert answer.code is RefusalCode.RESOURCE_EXHAUSTED, str(answer)
            journey.is_under_way = False
        elif self._is_local:
            assert self.prefill.admit_local(journey.resumed, answer)
        else:
            journey.handoff = self.prefill.admit(journey.resumed, answer)

    def _deliver(self) -> None:
        for journey in self.journeys:
            handoff = journey.handoff
            if handoff is not None and not handoff.has_ended and (handoff.commit is not None or handoff.is_cancelled):
                deliver(self.prefill, self.decode, handoff)

    def _read_events(self) -> None:
        by_key = {journey.request.key: journey for journey in self.journeys}
        for side in (self.decode, self.prefill):
            events = side.sink.events[self._num_seen[id(side.sink)] :]
            self._num_seen[id(side.sink)] += len(events)
            for event in events:
                journey = by_key[event.key]
                if event.attempt == journey.attempt and journey.is_under_way and not journey.is_finished:
                    self._on_event(journey, event)

    def _on_event(self, journey: Journey, event: SequenceEvent) -> None:
        if not isinstance(event, TokenEvent):
            journey.is_under_way = False
            journey.num_evictions += isinstance(event, SequenceEvicted)
            return
        assert event.index <= len(journey.token_ids), "a gap in the stream"
        if event.index == len(journey.token_ids):
            journey.token_ids.append(event.token_id)
        assert journey.token_ids[event.index] == event.token_id
        if event.finish_reason is not None:
            journey.is_finished = True
            self.decode.phase.abort(event.key, event.attempt)
            self.prefill.phase.abort(event.key, event.attempt)
            self.prefill.close_cancelled()
