"""A router that asks a pair of workers for many texts at once while clients leave, routers fall silent, workers die, ways break
and frozen senders wake, each at a random moment. All that is drawn comes from one seed.

Checked all the time: every token, whoever tells it and whether or not anybody still wants it; and every few turns all pages of
both workers (tests.page_audit). In the end whoever stayed has the text of an undisturbed run, and nothing is held any more.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from serving_core.clock import ManualClock
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.token_event import FailureKind, SequenceEvent, SequenceEvicted, SequenceFailed
from serving_core.transfer_ticket import TransferTicket
from tests.page_audit import assert_nothing_shared_is_written, audit_decode, audit_prefill
from tests.pages import assert_no_leaks
from tests.phases import LEASE_S, ROUTER, RecordingSink, expected_tokens, make_prompt, make_request
from tests.resuming_router import Journey
from tests.stepped_pair import Faults, Shape, SteppedDecode, SteppedPrefill, Turns
from twinpool.transfer_way import TransferWay

NUM_CLIENTS = 24
NUM_ARRIVAL_TURNS = 60
MAX_TURNS = 4000
MAX_STORM_S = 40.0
"""Of real time: over torch.distributed an end whose other end has gone takes five seconds, or thousands of turns, to see it."""
AUDIT_EVERY = 6
MAX_PROMPT, MAX_ANSWER = 40, 20
PAGE_SIZES = (2, 3, 4, 8)
SALTS = (b"", b"salt")
RENEW_EVERY_S = LEASE_S / 3
MAX_TURNS_FOR_TICKET = 40
"""Then the router gives the reservation up and lets go of what prefill has: else two might wait for what the other holds."""
PATIENCE_S = 20.0
"""Of real time, for what sockets still bring in the end."""
OVER = {
    RefusalCode.STALE_ATTEMPT,
    RefusalCode.LEASE_EXPIRED,
    RefusalCode.UNKNOWN_RESERVATION,
    RefusalCode.RESOURCE_EXHAUSTED,
}
"""Refusals that tell a router, or whoever sends late, that something has ended meanwhile."""
LATE = OVER | {RefusalCode.INCOMPLETE, RefusalCode.MALFORMED}
"""Also a commit before its pages have come again, or pages that are lent to the local path."""


class Abort(enum.Enum):
    """What happens to a request, or to a worker with all of its requests."""

    CLIENT_LEAVES = "both workers are told that the client has left"
    HALF_HEARD = "one worker is told, the other finds out by its lease"
    ROUTER_SILENT = "nobody is told; leases end"
    RETRY = "the router asks again, under a higher attempt"
    WITHDRAWN = "the caller of a reservation gives up waiting, and asks again"
    PREFILL_DIES = "the prefill worker is gone, and another comes"
    DECODE_DIES = "the decode worker is gone, and another comes"


_OF_A_CLIENT = (Abort.CLIENT_LEAVES, Abort.HALF_HEARD, Abort.ROUTER_SILENT, Abort.RETRY, Abort.RETRY, Abort.WITHDRAWN)


@dataclass(eq=False)
class Client(Journey):
    """A request with the turns, counted from its arrival, in which something happens to it."""

    expected: list[int] = field(default_factory=list)
    arrives_at: int = 0
    due: list[tuple[int, Abort]] = field(default_factory=list)
    is_wanted: bool = True
    is_local: bool = False
    is_started: bool = False
    has_begun: bool = False
    """Decode has told a token of this attempt: the hand-off happened."""
    answer: Callable[[TransferTicket | Refused], None] | None = None
    num_turns_waited: int = 0
    """For a ticket."""

    @property
    def is_over(self) -> bool:
        return self.is_finished or not self.is_wanted


class Storm:
    """One storm. ``counts`` has what happened, ``fingerprint`` is that of every event in its order."""

    def __init__(self, seed: int, way: TransferWay | None) -> None:
        self.aborts: Counter[Abort] = Counter()
        self.others: Counter[str] = Counter()
        self.num_finished = 0
        self._chance = random.Random(seed)
        self._clock = ManualClock()
        self._renew_at = 0.0
        self._turns = Turns()
        self._is_loopback = way is None
        self._faults = Faults(self._chance, p_break=self._chance.choice((0.0, 0.0, 0.02, 0.1)))
        self._shape = self._draw_shape(way)
        self._num_incarnations = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []
        self._journal = hashlib.blake2b(digest_size=16)
        self._clients = self._draw_clients()
        self._by_key = {client.request.key: client for client in self._clients}
        kinds = [kind for kind in (Abort.PREFILL_DIES, Abort.DECODE_DIES) for _ in range(self._chance.randrange(3))]
        self._deaths = {self._chance.randrange(3 * NUM_ARRIVAL_TURNS): kind for kind in kinds}

    @property
    def num_aborts(self) -> int:
        return self.aborts.total()

    @property
    def fingerprint(self) -> str:
        return self._journal.hexdigest()

    async def run(self) -> None:
        """Raises ``AssertionError`` for whatever is not as it should be."""
        self._decode = await self._new_decode()
        self._prefill = self._new_prefill()
        try:
            began_at = time.monotonic()
            for turn in itertools.count():
                if all(client.is_over for client in self._clients):
                    break
                if turn >= MAX_TURNS and time.monotonic() - began_at > MAX_STORM_S:
                    left = [(c.request.key, c.attempt, len(c.token_ids)) for c in self._clients if not c.is_over]
                    raise AssertionError(f"after {turn} turns these have not ended: {left}")
                await self._turn(turn)
            await self._run_down()
        finally:
            await self._prefill.close()
            await self._decode.close()
        self.num_finished = sum(client.is_finished for client in self._clients)
        self.others["broken ways and lost commits"] += self._faults.num_broken
        for client in self._clients:
            assert not client.is_finished or client.token_ids == client.expected

    # What is drawn beforehand

    def _draw_shape(self, way: TransferWay | None) -> Shape:
        chance = self._chance
        prefill_size, decode_size = chance.choice(PAGE_SIZES), chance.choice(PAGE_SIZES)
        num_prefill, num_decode = -(-MAX_PROMPT // prefill_size), -(-(MAX_PROMPT + MAX_ANSWER) // decode_size)
        return Shape(
            way=way,
            prefill_page_size=prefill_size,
            decode_page_size=decode_size,
            num_prefill_pages=num_prefill + chance.randrange(2 * num_prefill),
            num_decode_pages=num_decode + chance.randrange(2 * num_decode),
            max_num_seqs=chance.randrange(2, 9),
            max_num_batched_tokens=chance.randrange(3, 24),
            max_segment_bytes=chance.choice((8, 12, 1 << 20)),
            is_ahead=chance.random() < 0.5,
        )

    def _draw_clients(self) -> list[Client]:
        chance = self._chance
        clients: list[Client] = []
        for number in range(NUM_CLIENTS):
            own = make_prompt(chance.randrange(1, 9), first=chance.randrange(900))
            if clients and chance.random() < 0.2:  # the next turn of a conversation
                before = chance.choice(clients)
                known = (*before.request.prompt_token_ids, *before.expected)
            else:
                known = make_prompt(chance.randrange(MAX_PROMPT), first=chance.choice((1, 1, 200, 400)))
            request = make_request(
                name=f"r{number}",
                prompt_token_ids=(*known[: MAX_PROMPT - len(own)], *own),
                max_tokens=chance.randrange(1, MAX_ANSWER + 1),
                cache_salt=chance.choice((b"", *SALTS)),
            )
            num_due = chance.choices((0, 1, 2, 3), (25, 45, 20, 10))[0]
            due = [(chance.randrange(60), chance.choice(_OF_A_CLIENT)) for _ in range(num_due)]
            client = Client(
                request,
                expected=expected_tokens(request.prompt_token_ids, request.sampling.max_tokens),
                arrives_at=chance.randrange(NUM_ARRIVAL_TURNS),
                due=sorted(due, key=lambda entry: entry[0]),
            )
            clients.append(client)
        return clients

    # Workers

    async def _new_decode(self) -> SteppedDecode:
        self._num_incarnations += 1
        name = f"d{self._num_incarnations}"
        decode = SteppedDecode(self._clock, self._shape, self._turns, self._faults, incarnation=name)
        decode.side.runner.before_run = partial(assert_nothing_shared_is_written, decode.side.pool)
        await decode.open()
        return decode

    def _new_prefill(self) -> SteppedPrefill:
        prefill = SteppedPrefill(self._clock, self._shape, self._turns, self._faults, find=lambda: self._decode)
        prefill.side.runner.before_run = partial(assert_nothing_shared_is_written, prefill.side.pool)
        return prefill

    async def _replace_prefill(self) -> None:
        await self._prefill.close()
        self._prefill = self._new_prefill()
        for client in self._clients:
            if client.is_started and not client.is_local and not client.has_begun:
                client.is_under_way = False

    async def _replace_decode(self) -> None:
        await self._decode.close()
        self._decode = await self._new_decode()
        for client in self._clients:
            client.is_under_way = False

    # One turn

    async def _turn(self, turn: int) -> None:
        chance = self._chance
        for client in self._clients:
            if turn >= client.arrives_at and not client.is_over:
                self._lead_on(client)
                self._let_happen(client, turn)
        if (death := self._deaths.pop(turn, None)) is not None:
            self.aborts[death] += 1
            await (self._replace_prefill() if death is Abort.PREFILL_DIES else self._replace_decode())
        self._send_late()
        await self._step(is_decode=chance.random() < 0.85, is_prefill=chance.random() < 0.85)
        self._pass_time(turn)
        if turn % AUDIT_EVERY == 0:
            self._audit()

    def _lead_on(self, client: Client) -> None:
        if not client.is_under_way:
            if self._chance.random() < 0.5:
                self._ask(client)
        elif client.answers:
            if self._chance.random() < 0.7:
                self._start(client)
        elif not client.is_started:
            client.num_turns_waited += 1
            if client.num_turns_waited > MAX_TURNS_FOR_TICKET:
                self.others["no ticket in time"] += 1
                self._withdraw(client)
                self._release(client, is_decode_told=True, is_prefill_told=True)
                client.is_under_way = False

    async def _step(self, *, is_decode: bool, is_prefill: bool) -> None:
        if is_decode:
            self._decode.loop.turn()
        if is_prefill:
            self._prefill.loop.turn()
        self._turns.pass_one()
        if not self._is_loopback:
            await asyncio.sleep(self._chance.choice((0.0, 0.0005, 0.002)))
        for _ in range(self._chance.choice((0, 1, 3, 8, 30))):
            await asyncio.sleep(0)
        self._read_events()
        for error in self._errors:
            raise error

    def _ask(self, client: Client) -> None:
        client.attempt += 1
        client.is_under_way = True
        client.is_started = client.has_begun = False
        client.num_turns_waited = 0
        client.answers = []
        client.answer = answer = client.answers.append
        reserve = partial(self._decode.side.phase.reserve, client.resumed, client.attempt, ROUTER, answer)
        self._decode.loop.call(partial(reserve, num_evictions=client.num_evictions))

    def _start(self, client: Client) -> None:
        answer, client.answers = client.answers[0], []
        if isinstance(answer, Refused):
            assert answer.code in OVER, answer
            self.others[f"refused: {answer.code.name}"] += 1
            client.is_under_way = False
            return
        client.is_started = True
        client.is_local = self._chance.random() < 0.15
        service = self._decode.local_service if client.is_local else self._prefill.service
        for _ in range(1 + (self._chance.random() < 0.05)):  # a call may be repeated
            self._spawn(self._start_prefill(client, service.start(client.resumed, answer), answer))

    async def _start_prefill(self, client: Client, starting: Coroutine[Any, Any, None], ticket: TransferTicket) -> None:
        try:
            await starting
        except (Refused, WorkerLost) as error:
            if isinstance(error, Refused) and error.code not in OVER:
                raise
            if client.attempt == ticket.attempt:
                client.is_under_way = False

    def _let_happen(self, client: Client, turn: int) -> None:
        while client.due and not client.is_over and client.arrives_at + client.due[0][0] <= turn:
            _, abort = client.due.pop(0)
            self.aborts[abort] += 1
            match abort:
                case Abort.CLIENT_LEAVES:
                    self._release(client, is_decode_told=True, is_prefill_told=True)
                case Abort.HALF_HEARD:
                    is_decode_told = self._chance.random() < 0.5
                    self._release(client, is_decode_told=is_decode_told, is_prefill_told=not is_decode_told)
                case Abort.WITHDRAWN if client.is_under_way and not client.is_started:
                    self._withdraw(client)
            if abort in (Abort.RETRY, Abort.WITHDRAWN):
                client.is_under_way = False
            else:
                client.is_wanted = False

    def _withdraw(self, client: Client) -> None:
        assert client.answer is not None
        phase = self._decode.side.phase
        self._decode.loop.call(partial(phase.withdraw, client.request.key, client.attempt, client.answer))

    def _release(self, client: Client, *, is_decode_told: bool, is_prefill_told: bool) -> None:
        key, attempt = client.request.key, client.attempt
        if is_decode_told:
            for phase in self._decode.phases:
                self._decode.loop.call(partial(phase.abort, key, attempt))
        if is_prefill_told:
            self._prefill.loop.call(partial(self._prefill.side.phase.abort, key, attempt))

    def _send_late(self) -> None:
        """A sender that was frozen wakes, with what it had: nothing may come of it."""
        if self._faults.late_segments and self._chance.random() < 0.1:
            self._spawn(self._send_late_segment())
        if self._faults.late_commits and self._chance.random() < 0.05:
            ticket, commit = self._chance.choice(self._faults.late_commits)
            self._spawn(self._refused_at_most(self._prefill.commits.send(ticket, commit)))

    async def _send_late_segment(self) -> None:
        ticket, segment = self._chance.choice(self._faults.late_segments)

        async def send() -> None:
            async with self._prefill.transport.inner.open(ticket) as stream:
                await stream.write(segment)
                await stream.flush()

        await self._refused_at_most(send())

    async def _refused_at_most(self, sending: Awaitable[None]) -> None:
        self.others["late messages"] += 1
        try:
            await sending
        except WorkerLost:
            pass
        except Refused as refused:
            if refused.code not in LATE:
                raise

    def _pass_time(self, turn: int) -> None:
        self._clock.advance(self._chance.choice((0.0, 0.02, 0.1, 0.2)))
        if self._clock.now() < self._renew_at:
            return
        self._renew_at = self._clock.now() + RENEW_EVERY_S
        keys = frozenset(c.request.key for c in self._clients if not c.is_over and turn >= c.arrives_at)
        for phase in self._decode.phases:
            self._decode.loop.call(partial(phase.renew, keys))
        self._prefill.loop.call(partial(self._prefill.side.phase.renew, keys))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)

    # What comes of it

    def _read_events(self) -> None:
        for sink, is_decode in (
            (self._decode.side.sink, True),
            (self._decode.local.sink, False),
            (self._prefill.side.sink, False),
        ):
            for event in _take_events(sink):
                self._journal.update(repr(event).encode())
                self._on_event(self._by_key[event.key], event, is_decode=is_decode)

    def _on_event(self, client: Client, event: SequenceEvent, *, is_decode: bool) -> None:
        is_heard = event.attempt == client.attempt and client.is_under_way and not client.is_over
        if isinstance(event, SequenceEvicted | SequenceFailed):
            assert not (isinstance(event, SequenceFailed) and event.kind is FailureKind.INTERNAL), event
            if is_heard and (is_decode or not client.has_begun):
                self.others[type(event).__name__] += 1
                client.num_evictions += isinstance(event, SequenceEvicted)
                client.is_under_way = False
            return
        assert event.token_id == client.expected[event.index], f"a wrong token: {event}"
        assert (event.finish_reason is None) == (event.index < len(client.expected) - 1), event
        if not is_heard:
            return
        client.has_begun |= is_decode
        assert event.index <= len(client.token_ids), f"a gap before {event}"
        if event.index == len(client.token_ids):
            client.token_ids.append(event.token_id)
        if event.finish_reason is not None:
            client.is_finished = True
            self._release(client, is_decode_told=self._chance.random() < 0.9, is_prefill_told=self._chance.random() < 0.9)

    def _audit(self) -> None:
        audit_decode(self._decode.side, SALTS)
        audit_prefill(self._prefill.side, SALTS)

    async def _run_down(self) -> None:
        """Every router is gone: after one lease nothing is held, whatever went before."""
        self._clock.advance(LEASE_S)
        async with asyncio.timeout(PATIENCE_S):
            while not self._is_idle():
                await self._step(is_decode=True, is_prefill=True)
        self._audit()
        assert_no_leaks(self._decode.side.pool)
        assert_no_leaks(self._prefill.side.pool)

    def _is_idle(self) -> bool:
        statuses = [phase.status() for phase in (*self._decode.phases, self._prefill.side.phase)]
        is_open = self._tasks or self._prefill.service.num_tasks or self._decode.local_service.num_tasks
        return not is_open and all(status.num_running == status.num_waiting == 0 for status in statuses)


def _take_events(sink: RecordingSink) -> list[SequenceEvent]:
    events = sink.events
    sink.emits.clear()
    return events
