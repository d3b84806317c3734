"""Replay with a real engine: a sequence that goes on from its log has the same keys and values, bit for bit, and gets the same
answer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_worker.decode_phase import DecodePhase
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel, load_model
from llm_engine.model_runner import ModelRunner
from llm_engine.page_pool import PagePool
from llm_engine.phase import Phase, finished
from llm_engine.step_plan import StepPlan, StepResult
from llm_engine.token_rules import TokenRules
from prefill_worker.prefill_phase import PrefillPhase
from serving_core.clock import ManualClock
from serving_core.errors import Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import Incarnation, RequestId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType
from serving_core.sampling_params import SamplingParams
from serving_core.token_event import TokenEvent
from serving_core.transfer_ticket import TransferTicket
from serving_core.worker_status import PhaseName
from tests.pages import assert_no_leaks
from tests.phases import ROUTER, RecordingSink
from tests.tiny_model import write_tiny_gguf
from tests.unit.llm_engine.tiny_engine import numbers_of

PAGE_SIZE = 16
MAX_TOKENS = 60
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(
    max_tokens=MAX_TOKENS, temperature=1.0, seed=7, top_p=0.95, ignore_eos=True, frequency_penalty=0.4, repetition_penalty=1.1
)


class Worker:
    """Both phases over one real engine. ``kv`` keeps what each sequence had cached after its last decode step."""

    def __init__(self, loaded: LoadedModel, cache_dtype: KVDType, *, num_pages: int = 64, max_replay_tokens: int = 16) -> None:
        layout = loaded.config.page_layout(page_size=PAGE_SIZE, dtype=cache_dtype)
        clock = ManualClock()
        self.pool = PagePool(num_pages, PAGE_SIZE, clock)
        self.cache = KVCache(layout, num_pages)
        self.sink = RecordingSink()
        self.kv: dict[SequenceKey, torch.Tensor] = {}
        self.runner = ModelRunner(loaded, self.cache)
        rules = TokenRules(eos_token_ids=loaded.eos_token_ids, num_tokens=loaded.config.num_tokens, max_model_len=256)
        self.decode = DecodePhase(
            worker_id=WorkerId("worker-0"),
            incarnation=Incarnation("w0"),
            address="127.0.0.1:1",
            layout=layout,
            pool=self.pool,
            cache=self.cache,
            rules=rules,
            sink=self.sink,
            clock=clock,
            lease_s=6.0,
            max_num_seqs=8,
            max_replay_tokens=max_replay_tokens,
            new_reservation_id=(ReservationId(f"{number:032x}") for number in itertools.count()).__next__,
        )
        self.prefill = PrefillPhase(
            worker_id=WorkerId("worker-0"),
            layout=layout,
            pool=self.pool,
            rules=rules,
            sink=self.sink,
            clock=clock,
            lease_s=6.0,
            max_num_batched_tokens=32,
            max_num_seqs=8,
            local_decode=self.decode,
        )

    def send(self, request: GenerateRequest, attempt: int = 1, *, num_evictions: int = 0) -> None:
        def start(answer: TransferTicket | Refused) -> None:
            assert isinstance(answer, TransferTicket), str(answer)
            self.prefill.admit(request, answer, ROUTER, None)

        self.decode.reserve(request, attempt, ROUTER, start, num_evictions=num_evictions)

    def run_out(self) -> None:
        while any([self._step(self.decode), self._step(self.prefill)]):
            pass

    def tokens_of(self, key: SequenceKey) -> tuple[int, ...]:
        """The answer as its router has it, of all attempts together."""
        events = (event for event in self.sink.events if isinstance(event, TokenEvent) and event.key == key)
        answer = {event.index: event.token_id for event in events}
        return tuple(answer[index] for index in range(len(answer)))

    def _step(self, phase: Phase) -> bool:
        plan = phase.plan()
        if plan is None:
            return False
        result = finished(self.runner.run(plan))
        self._keep_kv(plan, result)
        phase.apply(plan, result)
        return True

    def _keep_kv(self, plan: StepPlan, result: StepResult) -> None:
        if plan.phase is not PhaseName.DECODE:
            return
        assert not result.failures
        for row in plan.rows:
            pages = numbers_of(self.cache, row.page_ids)  # [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]
            by_token = pages.permute(0, 3, 1, 2, 4, 5).flatten(0, 1)  # [num_slots, num_layers, 2, num_kv_heads, head_dim]
            self.kv[row.key] = by_token[: row.start_position + len(row.token_ids)].clone()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((KVDType.FLOAT32, KVDType.FLOAT32), id="float32"),
        pytest.param((KVDType.BFLOAT16, KVDType.BFLOAT16), id="bfloat16"),
        pytest.param((KVDType.BFLOAT16, KVDType.INT8), id="bfloat16 over int8"),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, KVDType]:
    """With the type of its cache."""
    dtype, cache_dtype = request.param
    path: Path = write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", seed=3)
    return load_model(path, dtype=dtype), cache_dtype


def make_request(name: str, num_prompt_tokens: int, sampling: SamplingParams) -> GenerateRequest:
    prompt = tuple((17 * index + len(name)) % 250 + 3 for index in range(num_prompt_tokens))
    return GenerateRequest(key=SequenceKey(RequestId(name)), prompt_token_ids=prompt, sampling=sampling)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "sampling"), [(1, GREEDY), (16, SEEDED), (45, SEEDED)], ids=["1-greedy", "16-seeded", "45-seeded"]
)
def test_a_replayed_log_gives_equal_bits_and_the_same_answer(
    model: tuple[LoadedModel, KVDType], num_prompt_tokens: int, sampling: SamplingParams
) -> None:
    request = make_request("a", num_prompt_tokens, sampling)
    # 1. Undisturbed and alone.
    undisturbed = Worker(*model)
    undisturbed.send(request)
    undisturbed.run_out()
    answer = undisturbed.tokens_of(request.key)
    assert len(answer) == MAX_TOKENS
    # 2. From logs around page edges, cut in different ways, beside another sequence that goes its own way.
    for num_logged, max_replay_tokens in ((1, 16), (2, 16), (15, 16), (16, 5), (17, 3), (33, 64), (59, 16)):
        worker = Worker(*model, max_replay_tokens=max_replay_tokens)
        worker.send(make_request("other", 20, GREEDY))
        worker.send(replace(request, output_token_ids=answer[:num_logged]), 2)
        worker.run_out()
        replayed = [event for event in worker.sink.tokens_of(request.key) if event.index]
        assert tuple(event.token_id for event in replayed) == answer[max(1, num_logged - 1) :]
        assert torch.equal(worker.kv[request.key], undisturbed.kv[request.key]), num_logged
        assert_no_leaks(worker.pool)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_pool_too_small_for_all_changes_no_token(model: tuple[LoadedModel, KVDType], sampling: SamplingParams) -> None:
    requests = [
        make_request(name, num_prompt_tokens, sampling) for name, num_prompt_tokens in (("x", 5), ("yy", 18), ("zzz", 30))
    ]
    # 1. Each alone.
    expected: dict[SequenceKey, tuple[int, ...]] = {}
    for request in requests:
        alone = Worker(*model)
        alone.send(request)
        alone.run_out()
        expected[request.key] = alone.tokens_of(request.key)
    # 2. All at once in a pool that holds little more than one; who is evicted comes back as a router would send it.
    worker = Worker(*model, num_pages=8)
    for request in requests:
        worker.send(request)
    worker.run_out()
    num_evictions = 0
    while (evictions := worker.sink.evictions)[num_evictions:]:
        for event in evictions[num_evictions:]:
            (request,) = (request for request in requests if request.key == event.key)
            self_evictions = sum(other.key == event.key for other in evictions)
            log = worker.tokens_of(event.key)
            worker.send(replace(request, output_token_ids=log), event.attempt + 1, num_evictions=self_evictions)
        num_evictions = len(evictions)
        worker.run_out()
    assert num_evictions >= 1
    for request in requests:
        assert worker.tokens_of(request.key) == expected[request.key]
    assert worker.sink.failures == []
    assert_no_leaks(worker.pool)
