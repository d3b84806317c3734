"""Two phases with everything around them faked: a model whose tokens depend on every cached key, so that a page that is wrong,
missing or late shows in the answer; hand-offs that tests deliver by hand, in whole, in part or never."""

from __future__ import annotations

import struct
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from decode_worker.decode_phase import DecodePhase
from kv_transfer.page_transport import Segment
from llm_engine.page_pool import PagePool
from llm_engine.phase import Phase, finished
from llm_engine.step_plan import SampledToken, StepPlan, StepResult
from llm_engine.token_rules import TokenRules
from prefill_worker.handoff import LocalDecode
from prefill_worker.prefill_phase import PrefillPhase
from serving_core.byte_stride import ByteStride
from serving_core.clock import Clock, ManualClock
from serving_core.errors import Refused, TwinpoolError
from serving_core.generate_request import GenerateRequest
from serving_core.ids import Incarnation, PageId, RequestId, ReservationId, RouterId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.sampling_params import SamplingParams
from serving_core.token_event import SequenceEvent, SequenceEvicted, SequenceFailed, TokenEvent, TokenLogprobs
from serving_core.transfer_ticket import HandoffCommit, TransferTicket
from serving_core.worker_status import PhaseName

LAYOUT = KVPageLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=4, dtype=KVDType.FLOAT32)
NUM_TOKENS = 997
"""Ids of the fake model: 0 to 996."""
ROUTER = RouterId("router-0")
LEASE_S = 6.0
MAX_MODEL_LEN = 64


def next_token(token_ids: Sequence[int]) -> int:
    """What the fake model answers to these tokens."""
    return zlib.crc32(struct.pack(f"<{len(token_ids)}i", *token_ids)) % NUM_TOKENS


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What an undisturbed sequence answers."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def make_prompt(num_tokens: int, *, first: int = 1) -> tuple[int, ...]:
    return tuple((first + index) % NUM_TOKENS for index in range(num_tokens))


def make_request(
    num_prompt_tokens: int = 6,
    *,
    name: str = "a",
    max_tokens: int = 5,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
    output_token_ids: tuple[int, ...] = (),
    prompt_token_ids: tuple[int, ...] | None = None,
    cache_salt: bytes = b"",
    repetition_penalty: float = 1.0,
) -> GenerateRequest:
    """Of a prompt of its own unless ``prompt_token_ids`` is given."""
    own_prompt = make_prompt(num_prompt_tokens, first=zlib.crc32(name.encode()) % NUM_TOKENS)
    return GenerateRequest(
        key=SequenceKey(RequestId(name)),
        prompt_token_ids=own_prompt if prompt_token_ids is None else prompt_token_ids,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            repetition_penalty=repetition_penalty,
        ),
        output_token_ids=output_token_ids,
        cache_salt=cache_salt,
    )


class FakeCache:
    """Page memory of ``layout``, ``LAYOUT`` with pages of any size: page_size keys, then as many values, four bytes each."""

    def __init__(self, num_pages: int, layout: KVPageLayout = LAYOUT) -> None:
        self._page_size = layout.page_size
        self.pages = [bytearray(layout.page_bytes) for _ in range(num_pages)]

    def page_memory(self, page_id: PageId) -> memoryview:
        return memoryview(self.pages[page_id]).toreadonly()

    def write(self, page_id: PageId, offset: int, payload: memoryview, stride: ByteStride | None) -> None:
        assert stride is None
        self.pages[page_id][offset : offset + payload.nbytes] = payload

    def put_key(self, page_ids: Sequence[PageId], position: int, key: int) -> None:
        page, slot = divmod(position, self._page_size)
        struct.pack_into("<i", self.pages[page_ids[page]], 4 * slot, key)

    def keys(self, page_ids: Sequence[PageId], num_tokens: int) -> list[int]:
        slots = (divmod(position, self._page_size) for position in range(num_tokens))
        return [struct.unpack_from("<i", self.pages[page_ids[page]], 4 * slot)[0] for page, slot in slots]


class FakeRunner:
    """Writes token ids as keys and answers ``next_token`` of all keys it finds in the row's pages."""

    def __init__(self, cache: FakeCache) -> None:
        self._cache = cache
        self.plans: list[StepPlan] = []
        self.failing: set[SequenceKey] = set()
        self.before_run: Callable[[StepPlan], None] = lambda plan: None

    def run(self, plan: StepPlan) -> StepResult:
        self.before_run(plan)
        self.plans.append(plan)
        tokens: list[SampledToken | None] = []
        for row in plan.rows:
            for position, token_id in enumerate(row.token_ids, start=row.start_position):
                self._cache.put_key(row.page_ids, position, token_id)
            if row.sample is None:
                tokens.append(None)
                continue
            token_ids = self._cache.keys(row.page_ids, row.start_position + len(row.token_ids))
            tokens.append(SampledToken(token_id=next_token(token_ids), logprobs=TokenLogprobs(logprob=-0.5)))
        failures = tuple("The fake row failed." if row.key in self.failing else None for row in plan.rows)
        return StepResult(tokens=tuple(tokens), failures=failures if any(failures) else ())


class FakeAheadRunner:
    """A device that computes decode steps one after another, each as late as it may: when it is waited for, or something begins
    that is not waited for. Until then memory must be as the step needs it."""

    def __init__(self, inner: FakeRunner) -> None:
        self._inner = inner
        self._begun: deque[FakeStepUnderWay] = deque()
        self._newest: dict[SequenceKey, int] = {}  # what the step before sampled

    def run(self, plan: StepPlan) -> StepResult | FakeStepUnderWay:
        if plan.phase is not PhaseName.DECODE:
            while self._begun:
                self._compute_next()
            return self._inner.run(plan)
        step = FakeStepUnderWay(plan, self._compute_next)
        self._begun.append(step)
        return step

    def _compute_next(self) -> None:
        step = self._begun.popleft()
        rows = [replace(row, token_ids=(self._newest[row.key],)) if row.is_ahead else row for row in step.plan.rows]
        step.result = self._inner.run(replace(step.plan, rows=tuple(rows)))
        self._newest = {
            row.key: token.token_id for row, token in zip(rows, step.result.tokens, strict=True) if token is not None
        }


@dataclass
class FakeStepUnderWay:
    plan: StepPlan
    compute_next: Callable[[], None]
    result: StepResult | None = None

    def wait(self) -> StepResult:
        while self.result is None:
            self.compute_next()
        return self.result


class RecordingSink:
    """Keeps every emit as the routers would get it."""

    def __init__(self) -> None:
        self.emits: list[tuple[RouterId, list[SequenceEvent]]] = []

    def emit(self, router_id: RouterId, events: Sequence[SequenceEvent]) -> None:
        self.emits.append((router_id, list(events)))

    @property
    def events(self) -> list[SequenceEvent]:
        return [event for _, events in self.emits for event in events]

    def tokens_of(self, key: SequenceKey, attempt: int | None = None) -> list[TokenEvent]:
        return [
            event
            for event in self.events
            if isinstance(event, TokenEvent) and event.key == key and attempt in (None, event.attempt)
        ]

    @property
    def failures(self) -> list[SequenceFailed]:
        return [event for event in self.events if isinstance(event, SequenceFailed)]

    @property
    def evictions(self) -> list[SequenceEvicted]:
        return [event for event in self.events if isinstance(event, SequenceEvicted)]


@dataclass
class FakeHandoff:
    """What the prefill phase said to one hand-off."""

    ticket: TransferTicket
    pages: list[tuple[int, PageId]] = field(default_factory=list)
    commit: HandoffCommit | None = None
    is_cancelled: bool = False
    has_ended: bool = False
    num_sent: int = 0

    def offer(self, pages: Sequence[tuple[int, PageId]]) -> None:
        assert not self.is_cancelled
        assert self.commit is None
        first = self.ticket.num_cached_tokens // LAYOUT.page_size + len(self.pages)
        assert [ordinal for ordinal, _ in pages] == list(range(first, first + len(pages)))
        self.pages.extend(pages)

    def finish(self, token_id: int, logprobs: TokenLogprobs | None, *, num_cached_tokens: int = 0) -> None:
        assert not self.is_cancelled
        assert self.commit is None, "a hand-off finishes once"
        first_page = self.ticket.num_cached_tokens // LAYOUT.page_size
        assert len(self.pages) == LAYOUT.num_pages_for(self.ticket.num_prompt_tokens) - first_page
        self.commit = make_commit(self.ticket, token_id, logprobs=logprobs, num_cached_tokens=num_cached_tokens)

    def cancel(self) -> None:
        self.is_cancelled = True


def make_commit(
    ticket: TransferTicket, token_id: int, *, logprobs: TokenLogprobs | None = None, num_cached_tokens: int = 0
) -> HandoffCommit:
    return HandoffCommit(
        reservation_id=ticket.reservation_id,
        key=ticket.key,
        attempt=ticket.attempt,
        token_id=token_id,
        logprobs=logprobs,
        num_bytes_sent=(ticket.num_prompt_pages - ticket.first_page) * ticket.layout.page_bytes,
        num_cached_tokens=num_cached_tokens,
    )


def make_segment(ticket: TransferTicket, ordinal: int, payload: bytes | memoryview, *, offset: int = 0) -> Segment:
    return Segment(
        reservation_id=ticket.reservation_id,
        attempt=ticket.attempt,
        page_ordinal=ordinal,
        offset=offset,
        payload=memoryview(payload),
    )


def prompt_segments(ticket: TransferTicket, request: GenerateRequest) -> list[Segment]:
    """The prompt's pages as an honest prefill worker sends them: those that decode has not cached."""
    cache = FakeCache(ticket.num_prompt_pages)
    page_ids = [PageId(number) for number in range(ticket.num_prompt_pages)]
    for position, token_id in enumerate(request.prompt_token_ids):
        cache.put_key(page_ids, position, token_id)
    return [make_segment(ticket, ordinal, cache.page_memory(ordinal)) for ordinal in page_ids[ticket.first_page :]]


def step(phase: Phase, runner: FakeRunner, clock: Clock) -> StepPlan | None:
    """One turn of the step loop for one phase."""
    phase.expire(clock.now())
    plan = phase.plan()
    if plan is not None:
        phase.apply(plan, finished(runner.run(plan)))
    return plan


class DecodeSide:
    """A decode worker without its process. ``pool`` and ``cache`` may be shared with a prefill side."""

    def __init__(
        self,
        clock: ManualClock | None = None,
        *,
        num_pages: int = 16,
        max_num_seqs: int = 8,
        max_waiting: int = 16,
        max_replay_tokens: int = 5,
        eos: frozenset[int] = frozenset(),
        has_prefix_cache: bool = False,
        name: str = "decode-0",
        incarnation: str = "d0",
        address: str = "127.0.0.1:1",
        layout: KVPageLayout = LAYOUT,
    ) -> None:
        self.clock = clock or ManualClock()
        self.layout = layout
        self.pool = PagePool(num_pages, layout.page_size, self.clock)
        self.cache = FakeCache(num_pages, layout)
        self.runner = FakeRunner(self.cache)
        self.sink = RecordingSink()
        self._num_ids = 0
        self._incarnation = incarnation
        self.phase = DecodePhase(
            worker_id=WorkerId(name),
            incarnation=Incarnation(incarnation),
            address=address,
            layout=layout,
            pool=self.pool,
            cache=self.cache,
            rules=TokenRules(eos_token_ids=eos, num_tokens=NUM_TOKENS, max_model_len=MAX_MODEL_LEN),
            sink=self.sink,
            clock=self.clock,
            lease_s=LEASE_S,
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            max_replay_tokens=max_replay_tokens,
            new_reservation_id=self._new_id,
            has_prefix_cache=has_prefix_cache,
        )

    def _new_id(self) -> ReservationId:
        self._num_ids += 1
        return ReservationId(uuid.uuid5(uuid.NAMESPACE_OID, f"{self._incarnation}-{self._num_ids}").hex)

    def ask(self, request: GenerateRequest, attempt: int = 1, *, num_evictions: int = 0) -> list[TransferTicket | Refused]:
        """Reserve; the list gets the answers as they come."""
        answers: list[TransferTicket | Refused] = []
        self.phase.reserve(request, attempt, ROUTER, answers.append, num_evictions=num_evictions)
        return answers

    def reserve(self, request: GenerateRequest, attempt: int = 1, *, num_evictions: int = 0) -> TransferTicket:
        """Reserve where there is room."""
        (answer,) = self.ask(request, attempt, num_evictions=num_evictions)
        if isinstance(answer, Refused):
            raise answer
        return answer

    def begin(self, request: GenerateRequest, attempt: int = 1, *, num_evictions: int = 0) -> TransferTicket:
        """Reserve, deliver and commit as an honest prefill worker would."""
        ticket = self.reserve(request, attempt, num_evictions=num_evictions)
        self.phase.accept(prompt_segments(ticket, request))
        self.phase.commit(make_commit(ticket, next_token(request.prompt_token_ids)))
        return ticket

    def step(self) -> StepPlan | None:
        return step(self.phase, self.runner, self.clock)

    def run_out(self) -> None:
        """Step until there is nothing to run."""
        while self.step() is not None:
            pass

    def token_ids(self, key: SequenceKey, attempt: int | None = None) -> list[int]:
        return [event.token_id for event in self.sink.tokens_of(key, attempt)]


class PrefillSide:
    """A prefill worker without its process; with ``beside`` it shares that decode side's pool and cache."""

    def __init__(
        self,
        clock: ManualClock | None = None,
        *,
        num_pages: int = 16,
        max_num_batched_tokens: int = 8,
        max_num_seqs: int = 8,
        eos: frozenset[int] = frozenset(),
        has_prefix_cache: bool = False,
        beside: DecodeSide | None = None,
        layout: KVPageLayout = LAYOUT,
    ) -> None:
        self.clock = clock or (beside.clock if beside else ManualClock())
        self.layout = beside.layout if beside else layout
        self.pool = beside.pool if beside else PagePool(num_pages, layout.page_size, self.clock)
        self.cache = beside.cache if beside else FakeCache(num_pages, layout)
        self.runner = FakeRunner(self.cache)
        self.sink = RecordingSink()
        self.handoffs: list[FakeHandoff] = []
        local_decode: LocalDecode | None = beside.phase if beside else None
        self.phase = PrefillPhase(
            worker_id=WorkerId("prefill-0"),
            layout=self.layout,
            pool=self.pool,
            rules=TokenRules(eos_token_ids=eos, num_tokens=NUM_TOKENS, max_model_len=MAX_MODEL_LEN),
            sink=self.sink,
            clock=self.clock,
            lease_s=LEASE_S,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            local_decode=local_decode,
            has_prefix_cache=has_prefix_cache,
        )

    def admit(self, request: GenerateRequest, ticket: TransferTicket) -> FakeHandoff:
        """Start with a new hand-off, which runs only if the phase took it."""
        handoff = FakeHandoff(ticket=ticket)
        if self.phase.admit(request, ticket, ROUTER, handoff):
            self.handoffs.append(handoff)
        else:
            handoff.has_ended = True
        return handoff

    def admit_local(self, request: GenerateRequest, ticket: TransferTicket) -> bool:
        return self.phase.admit(request, ticket, ROUTER, None)

    def step(self) -> StepPlan | None:
        return step(self.phase, self.runner, self.clock)

    def run_out(self) -> None:
        while self.step() is not None:
            pass

    def token_ids(self, key: SequenceKey, attempt: int | None = None) -> list[int]:
        return [event.token_id for event in self.sink.tokens_of(key, attempt)]

    def end_handoff(self, handoff: FakeHandoff, error: TwinpoolError | None) -> None:
        """Report what the hand-off's task would report, once."""
        assert not handoff.has_ended
        handoff.has_ended = True
        self.phase.handoff_ended(handoff.ticket.key, handoff.ticket.attempt, error)

    def close_cancelled(self) -> None:
        """Let the tasks of cancelled hand-offs end, as they do soon after."""
        for handoff in self.handoffs:
            if handoff.is_cancelled and not handoff.has_ended:
                self.end_handoff(handoff, None)


def push_page(prefill: PrefillSide, decode: DecodeSide, handoff: FakeHandoff) -> None:
    """Send the hand-off's next page. Raises ``Refused`` as the decode side does."""
    ordinal, page_id = handoff.pages[handoff.num_sent]
    decode.phase.accept([make_segment(handoff.ticket, ordinal, prefill.cache.page_memory(page_id))])
    handoff.num_sent += 1


def deliver(prefill: PrefillSide, decode: DecodeSide, handoff: FakeHandoff) -> None:
    """Run a hand-off that was finished or cancelled to its end, as its task would."""
    if handoff.is_cancelled:
        prefill.end_handoff(handoff, None)
        return
    try:
        while handoff.num_sent < len(handoff.pages):
            push_page(prefill, decode, handoff)
        assert handoff.commit is not None
        decode.phase.commit(handoff.commit)
    except Refused as refused:
        prefill.end_handoff(handoff, refused)
    else:
        prefill.end_handoff(handoff, None)
