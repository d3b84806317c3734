"""Split = unsplit whatever is cached where, and the usage tells what was: a tiny float32 model, real workers in one process."""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from llm_engine.engine_calls import run_between_steps
from llm_engine.load_model import LoadedModel, load_model
from serving_core import metric_names
from serving_core.engine_config import EngineConfig
from serving_core.generate_request import GenerateRequest
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.page_state import PageState
from serving_core.sampling_params import SamplingParams
from serving_core.token_event import TokenEvent
from serving_core.worker_status import PhaseName
from tests.equality_prompts import mt_bench_turns
from tests.integration.in_process_server import COLOCATED, DECODE, PREFILL, Answer, InProcessServer, in_process_server
from tests.pairwise import pairwise
from tests.tiny_model import write_tiny_gguf
from twinpool.model_source import DEFAULT_MODEL, find_model
from twinpool.worker import Worker

PAGE_SIZES = (8, 16, 32)
LENGTHS = (1, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65)
NUM_TOKENS = 12
ENGINE = EngineConfig(
    dtype=KVDType.FLOAT32,
    page_size=16,
    max_model_len=128,
    max_num_seqs=64,
    max_num_batched_tokens=24,  # several chunks a prompt, several prompts a chunk
    kv_cache_memory_bytes=16 << 20,
    num_threads=1,
)
MAX_LOGPROB_DIFFERENCE = 1e-4


class Warmth(enum.Enum):
    """What is cached where when the prompt comes."""

    COLD = "cold"
    PREFILL = "prefill has all of it"
    DECODE_HALF = "decode has half of it"
    DECODE = "decode has all of it"
    BOTH = "both have all of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One of the covering array. ``number`` makes its prompt differ from all others in its first token."""

    number: int
    warmth: Warmth
    length: int
    prefill_size: int
    decode_size: int
    temperature: float

    @property
    def request(self) -> GenerateRequest:
        return make_request(f"row-{self.number}", make_prompt(self.number, self.length), temperature=self.temperature)

    def num_cached(self, num_warm: int, page_size: int) -> int:
        """Tokens of the prompt in full pages, where the first ``num_warm`` of them were there."""
        return min(num_warm // page_size, (self.length - 1) // page_size) * page_size

    @property
    def num_cached_by_prefill(self) -> int:
        is_warm = self.warmth in (Warmth.PREFILL, Warmth.BOTH)
        return self.num_cached(self.length if is_warm else 0, self.prefill_size)

    @property
    def num_cached_by_decode(self) -> int:
        share = {Warmth.DECODE_HALF: self.length // 2, Warmth.DECODE: self.length, Warmth.BOTH: self.length}
        return self.num_cached(share.get(self.warmth, 0), self.decode_size)


ROWS = [
    Row(number=number, warmth=warmth, length=length, prefill_size=ours, decode_size=theirs, temperature=temperature)
    for number, (length, warmth, ours, theirs, temperature) in enumerate(
        pairwise(LENGTHS, tuple(Warmth), PAGE_SIZES, PAGE_SIZES, (0.0, 0.9))
    )
]


def make_prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple(3 + (number + 11 * index * (number % 7 + 1)) % 256 for index in range(length))


def make_request(
    name: str, prompt: Sequence[int], *, temperature: float = 0.0, max_tokens: int = NUM_TOKENS, salt: bytes = b""
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=7, num_logprobs=2, ignore_eos=True)
    key = SequenceKey(RequestId(name))
    return GenerateRequest(key=key, prompt_token_ids=tuple(prompt), sampling=sampling, cache_salt=salt)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", num_heads=6, num_kv_heads=3)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, dtype=KVDType.FLOAT32)


@asynccontextmanager
async def server_of(
    path: Path, loaded: LoadedModel, page_sizes: dict[str, int], *, engine: EngineConfig = ENGINE
) -> AsyncIterator[InProcessServer]:
    phases = {"prefill-0": PREFILL, "decode-0": DECODE, "colocated-0": COLOCATED}
    workers = [(name, phases[name]) for name in page_sizes]
    async with in_process_server(path, loaded, workers, engine=engine, page_sizes=page_sizes) as server:
        yield server
        await server.assert_no_leaks()


async def answers_without_cache(path: Path, loaded: LoadedModel, requests: Sequence[GenerateRequest]) -> list[Answer]:
    """One worker with both phases, which keeps nothing."""
    engine = replace(ENGINE, has_prefix_cache=False)
    async with server_of(path, loaded, {"colocated-0": 16}, engine=engine) as server:
        answers = await server.generate_all(requests)
        assert (await server.workers["colocated-0"].read_pages(True)).counts[PageState.CACHED] == 0
    return answers


@pytest.fixture(scope="module")
def unsplit(path: Path, loaded: LoadedModel) -> list[Answer]:
    return asyncio.run(answers_without_cache(path, loaded, [row.request for row in ROWS]))


async def generate(server: InProcessServer, request: GenerateRequest) -> tuple[Answer, int]:
    """The answer, and how many tokens of the prompt its usage calls cached."""
    generation = await server.router.generator.start(request)
    try:
        events: list[TokenEvent] = [event async for event in generation]
    finally:
        await generation.aclose()
    answer = Answer(
        token_ids=tuple(event.token_id for event in events),
        logprobs=tuple(event.logprobs for event in events),
        finish_reason=events[-1].finish_reason,
    )
    assert all(event.num_cached_tokens == 0 for event in events[1:])
    return answer, events[0].num_cached_tokens


async def forget_all(worker: Worker) -> None:
    """As if its process had just started."""
    pool = worker._pool
    await run_between_steps(worker._loop, lambda: pool.forget([PageId(number) for number in range(pool.num_pages)]))


async def warm_up(server: InProcessServer, row: Row) -> None:
    """Prompts whose only token ends them are never handed over, so that decode learns nothing of them."""
    num_tokens = row.length // 2 if row.warmth is Warmth.DECODE_HALF else row.length
    if row.warmth is Warmth.COLD or num_tokens == 0:
        return
    prompt = row.request.prompt_token_ids[:num_tokens]
    await server.generate(make_request(f"warm-{row.number}", prompt, max_tokens=1 if row.warmth is Warmth.PREFILL else 2))
    if row.warmth in (Warmth.DECODE_HALF, Warmth.DECODE):
        await forget_all(server.workers["prefill-0"])


async def metric(worker: Worker, name: str) -> float:
    """Of one series, as it is now."""
    families = {family.name: family for family in (await worker.read_status()).metrics}
    return families[name].samples[0].value


def test_the_covering_array_covers() -> None:
    assert len(ROWS) < 80
    pairs = Counter((row.warmth, row.length) for row in ROWS)
    assert pairs.keys() == set(itertools.product(Warmth, LENGTHS))
    assert {(row.prefill_size, row.decode_size) for row in ROWS} == set(itertools.product(PAGE_SIZES, repeat=2))


@pytest.mark.parametrize(
    "page_sizes", tuple(itertools.product(PAGE_SIZES, repeat=2)), ids=lambda sizes: "to".join(map(str, sizes))
)
async def test_split_equals_unsplit_whatever_is_cached_where(
    path: Path, loaded: LoadedModel, unsplit: list[Answer], page_sizes: tuple[int, int]
) -> None:
    prefill_size, decode_size = page_sizes
    async with server_of(path, loaded, {"prefill-0": prefill_size, "decode-0": decode_size}) as server:
        decode = server.workers["decode-0"]
        for row in (row for row in ROWS if (row.prefill_size, row.decode_size) == page_sizes):
            await warm_up(server, row)
            names = (metric_names.PREFIX_CACHE_HITS_TOTAL, metric_names.KV_TRANSFER_BYTES_TOTAL)
            before = [await metric(decode, name) for name in names]
            answer, num_cached = await generate(server, row.request)
            num_hits, num_bytes = [await metric(decode, name) - old for name, old in zip(names, before, strict=True)]
            assert answer == unsplit[row.number], row  # log probabilities too, bit for bit
            assert (num_cached, num_hits) == (row.num_cached_by_prefill, row.num_cached_by_decode), row
            layout = decode.hello.layout
            num_pages = layout.num_pages_for(row.length) - row.num_cached_by_decode // decode_size
            assert num_bytes == num_pages * layout.page_bytes, row


@pytest.mark.parametrize("page_size", PAGE_SIZES)
async def test_one_worker_with_both_phases_and_a_cache(
    path: Path, loaded: LoadedModel, unsplit: list[Answer], page_size: int
) -> None:
    async with server_of(path, loaded, {"colocated-0": page_size}) as server:
        for row in ROWS[::3]:
            cold, num_cached_cold = await generate(server, row.request)
            again = replace(row.request, key=SequenceKey(RequestId(f"again-{row.number}")))
            warm, num_cached_warm = await generate(server, again)
            assert cold == warm == unsplit[row.number], row
            assert (num_cached_cold, num_cached_warm) == (0, row.num_cached(row.length, page_size)), row


@pytest.mark.parametrize("workers", [{"prefill-0": 16, "decode-0": 8}, {"colocated-0": 8}], ids=["pair", "one"])
async def test_the_next_turn_begins_with_the_answer(path: Path, loaded: LoadedModel, workers: dict[str, int]) -> None:
    """The answer's pages were computed by decode: equal tokens, and numbers as near as float32 has them."""
    async with server_of(path, loaded, workers) as server:
        first = make_request("first", make_prompt(1, 21))
        answer, _ = await generate(server, first)
        second = make_request("second", (*first.prompt_token_ids, *answer.token_ids, 9, 8, 7))
        *_, with_decode = server.workers.values()
        num_hits = await metric(with_decode, metric_names.PREFIX_CACHE_HITS_TOTAL)
        again, _ = await generate(server, second)
        assert await metric(with_decode, metric_names.PREFIX_CACHE_HITS_TOTAL) - num_hits == 32  # of 21 + 11 computed with
    (expected,) = await answers_without_cache(path, loaded, [second])
    assert again.token_ids == expected.token_ids
    for ours, theirs in zip(again.logprobs, expected.logprobs, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.logprob == pytest.approx(theirs.logprob, abs=MAX_LOGPROB_DIFFERENCE)


@pytest.mark.parametrize("workers", [{"prefill-0": 8, "decode-0": 16}, {"colocated-0": 16}], ids=["pair", "one"])
async def test_many_that_begin_alike_on_a_small_pool(path: Path, loaded: LoadedModel, workers: dict[str, int]) -> None:
    """So small that cached pages are given up all the time, and sequences evicted."""
    page_bytes = loaded.config.page_layout(page_size=16, dtype=KVDType.FLOAT32).page_bytes
    engine = replace(ENGINE, kv_cache_memory_bytes=14 * page_bytes, max_num_seqs=16)
    prompts = [
        (*make_prompt(beginning, num_common), *make_prompt(50 + number, 1 + number % 5))
        for number, (beginning, num_common) in enumerate(itertools.product((1, 2, 3), (15, 32, 47, 16, 33, 64)))
    ]
    requests = [make_request(f"r{number}", prompt, max_tokens=40) for number, prompt in enumerate(prompts)]
    async with server_of(path, loaded, workers, engine=engine) as server:
        answers = await server.generate_all(requests)
        num_hits = [await metric(worker, metric_names.PREFIX_CACHE_HITS_TOTAL) for worker in server.workers.values()]
        assert all(num_hits)
        for worker in server.workers.values():
            assert (await worker.read_pages(True)).is_sum_ok
    assert answers == await answers_without_cache(path, loaded, requests)


@pytest.mark.parametrize("workers", [{"prefill-0": 16, "decode-0": 32}, {"colocated-0": 16}], ids=["pair", "one"])
async def test_cached_pages_have_the_bits_of_fresh_ones_in_bfloat16(workers: dict[str, int]) -> None:
    """The default model, prefill and decode with the forms of the weights that a server gives them."""
    path = find_model(DEFAULT_MODEL).path
    engine = replace(ENGINE, dtype=KVDType.BFLOAT16, max_model_len=512, kv_cache_memory_bytes=64 << 20)
    async with server_of(path, load_model(path, dtype=KVDType.BFLOAT16), workers, engine=engine) as server:
        for number, prompt in enumerate(mt_bench_turns(path, 3)):
            beginning = await server.generate(make_request(f"beginning-{number}", prompt[: len(prompt) // 2], salt=b"warm"))
            assert len(beginning.token_ids) == NUM_TOKENS
            cold, _ = await generate(server, make_request(f"cold-{number}", prompt))
            half, num_half = await generate(server, make_request(f"half-{number}", prompt, salt=b"warm"))
            full, num_full = await generate(server, make_request(f"full-{number}", prompt))
            assert cold == half == full
            assert (num_half, num_full) == (len(prompt) // 2 // 16 * 16, (len(prompt) - 1) // 16 * 16)


@pytest.mark.parametrize(
    "workers",
    [{"prefill-0": PREFILL, "prefill-1": PREFILL, "decode-0": DECODE, "decode-1": DECODE}, {"colocated-0": COLOCATED}],
    ids=["pairs", "one"],
)
async def test_every_worker_has_the_warm_prompts_before_it_serves(
    path: Path, loaded: LoadedModel, workers: dict[str, frozenset[PhaseName]]
) -> None:
    warm = (make_prompt(1, 40), make_prompt(2, 17))
    async with in_process_server(path, loaded, list(workers.items()), engine=ENGINE, warm_prompts=warm) as server:
        async with asyncio.timeout(30):
            while any(worker["state"] != "ready" for worker in await workers_of(server)):  # noqa: ASYNC110 - a page to look at
                await asyncio.sleep(0.01)
        for worker in server.workers.values():
            assert (await worker.read_pages(True)).counts[PageState.CACHED] >= 3  # of 16 tokens: 2 + 1
        # as many requests at once as there are pairs, so that each worker gets one of them
        for number, prompt in enumerate(warm):
            begun = [make_request(f"r{number}-{i}", (*prompt, 200 + i, 3, 4)) for i in range(len(workers) // 2 or 1)]
            answers = await asyncio.gather(*(generate(server, request) for request in begun))
            assert [num_cached for _, num_cached in answers] == [len(prompt) // 16 * 16] * len(begun)
            assert [answer for answer, _ in answers] == await answers_without_cache(path, loaded, begun)
        await server.assert_no_leaks()


async def workers_of(server: InProcessServer) -> list[dict[str, object]]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.router.app), base_url="http://router") as client:
        return list((await client.get("/admin/workers")).json()["workers"])


async def test_usage_over_http(path: Path, loaded: LoadedModel) -> None:
    async with (
        server_of(path, loaded, {"prefill-0": 16, "decode-0": 16}) as server,
        httpx.AsyncClient(transport=httpx.ASGITransport(server.router.app), base_url="http://router") as client,
    ):

        async def num_cached(**fields: object) -> int:
            body = {"prompt": list(make_prompt(3, 40)), "max_tokens": 2, "ignore_eos": True, **fields}
            answer = await client.post("/v1/completions", json=body)
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert await num_cached() == 0
        assert await num_cached() == 32
        assert await num_cached(max_tokens=1) == 32
        assert await num_cached(cache_salt="tenant") == 0
        assert await num_cached(cache_salt="tenant") == 32
        assert await num_cached(cache_salt="other") == 0
        assert await num_cached(n=2) == 32  # of the prompt, which counts once
        two = [list(make_prompt(3, 40)), list(make_prompt(4, 40))]
        assert await num_cached(prompt=two) == 32
        assert await num_cached(prompt=two) == 64
