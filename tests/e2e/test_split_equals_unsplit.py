"""Split = unsplit for the real model and real processes: each way, pages that differ in size, with and without a warm cache.

Half of the combinations are in every run, all of them in ``make equality``. Every mix of these, on a tiny model in one process:
``tests/integration/test_covering_array.py``.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from llm_engine.load_model import load_model
from serving_core import metric_names
from serving_core.engine_config import EngineConfig
from serving_core.kv_page_layout import KVDType
from tests.e2e.server_process import MODEL, ServerProcess, serving, until
from tests.e2e.streams import completion_body, http_client
from tests.equality_prompts import prompts_of_lengths
from tests.integration.in_process_server import COLOCATED, in_process_server
from twinpool.model_source import find_model

pytestmark = pytest.mark.e2e

LENGTHS = (9, 33, 64, 65, 98)
NUM_TOKENS = 16
STATUS_TIMEOUT_S = 10.0
ENGINE = EngineConfig(
    dtype=KVDType.BFLOAT16,
    page_size=16,
    max_model_len=256,
    max_num_seqs=64,
    max_num_batched_tokens=48,  # several chunks a prompt, several prompts a chunk
    kv_cache_memory_bytes=128 << 20,
    num_threads=1,
)
FLAGS = (
    *("--dtype", ENGINE.dtype.value),
    *("--max-model-len", f"{ENGINE.max_model_len}"),
    *("--max-num-batched-tokens", f"{ENGINE.max_num_batched_tokens}"),
    *("--kv-cache-memory-bytes", f"{ENGINE.kv_cache_memory_bytes}"),
)


class Warmth(enum.Enum):
    """What is cached where when a prompt comes."""

    COLD = "cold"
    PREFILL = "prefill warm"
    DECODE_HALF = "decode half warm"
    DECODE = "decode warm"
    BOTH = "both warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A pair, asked cold and with ``warmth``. It alone decides whether prefill has a prefix cache."""

    way: str
    prefill_size: int
    decode_size: int
    warmth: Warmth
    kv_cache_dtype: str = "auto"

    def __str__(self) -> str:
        dtype = "" if self.kv_cache_dtype == "auto" else f"-{self.kv_cache_dtype}"
        return f"{self.way}-{self.prefill_size}to{self.decode_size}{dtype}"

    @property
    def has_prefill_cache(self) -> bool:
        return self.warmth in (Warmth.PREFILL, Warmth.BOTH)

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--transfer", self.way),
            *("--prefill-block-size", f"{self.prefill_size}"),
            *("--decode-block-size", f"{self.decode_size}"),
            *("--kv-cache-dtype", self.kv_cache_dtype),
            *(() if self.has_prefill_cache else ("--prefill-no-enable-prefix-caching",)),
        )


EVERY_RUN = (
    Setup(way="shared_memory", prefill_size=32, decode_size=8, warmth=Warmth.DECODE_HALF),
    Setup(way="grpc", prefill_size=32, decode_size=16, warmth=Warmth.BOTH, kv_cache_dtype="int8"),
)
FULL_COMPARISON = (
    Setup(way="grpc", prefill_size=8, decode_size=32, warmth=Warmth.PREFILL),
    Setup(way="torch_distributed", prefill_size=16, decode_size=8, warmth=Warmth.DECODE),
)
SETUPS = (*EVERY_RUN, *(pytest.param(setup, marks=pytest.mark.slow) for setup in FULL_COMPARISON))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Its ``salt`` keeps it from finding what another question has left."""

    prompt: tuple[int, ...]
    seed: int | None
    salt: str

    @property
    def body(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {"temperature": 0} if self.seed is None else {"temperature": 0.9, "seed": self.seed}
        return completion_body(
            self.prompt, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, cache_salt=self.salt, **sampling
        )

    def num_warm(self, warmth: Warmth) -> int:
        """Tokens of the prompt that are asked before it."""
        return {Warmth.COLD: 0, Warmth.DECODE_HALF: len(self.prompt) // 2}.get(warmth, len(self.prompt))

    def warm_up(self, warmth: Warmth) -> dict[str, Any]:
        """One token is not handed over, so that decode learns nothing of its prompt."""
        max_tokens = 1 if warmth is Warmth.PREFILL else 2
        prompt = self.prompt[: self.num_warm(warmth)]
        return completion_body(prompt, max_tokens=max_tokens, ignore_eos=True, cache_salt=self.salt)

    def num_cached(self, warmth: Warmth, page_size: int) -> int:
        """Tokens in full pages, but for the page with the prompt's last token."""
        return min(self.num_warm(warmth) // page_size, (len(self.prompt) - 1) // page_size) * page_size


def make_questions(salt: str) -> list[Question]:
    """Each prompt greedily and with a seed."""
    prompts = prompts_of_lengths(find_model(MODEL).path, LENGTHS)
    return [Question(prompt=prompt, seed=seed, salt=f"{salt}-{len(prompt)}-{seed}") for prompt in prompts for seed in (None, 7)]


async def ask_all(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole answers, asked at once."""
    answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    assert [answer.status_code for answer in answers] == [200] * len(bodies), [answer.text for answer in answers]
    return [answer.json() for answer in answers]


async def answer_unsplit(kv_cache_dtype: KVDType | None) -> list[dict[str, Any]]:
    """All questions' answers of one worker with both phases and without a prefix cache."""
    path = find_model(MODEL).path
    loaded = load_model(path, dtype=KVDType.BFLOAT16)
    engine = replace(ENGINE, kv_cache_dtype=kv_cache_dtype, has_prefix_cache=False)
    bodies = [question.body | {"model": "model"} for question in make_questions("unsplit")]
    async with (
        in_process_server(path, loaded, [("colocated-0", COLOCATED)], engine=engine) as server,
        httpx.AsyncClient(transport=httpx.ASGITransport(server.router.app), base_url="http://router") as client,
    ):
        return await ask_all(client, bodies)


@pytest.fixture(scope="module")
def unsplit_answers() -> dict[str, list[dict[str, Any]]]:
    """By the type of the KV cache."""
    types = {"auto": None, "int8": KVDType.INT8}
    return {name: asyncio.run(answer_unsplit(dtype)) for name, dtype in types.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A server of ``setup``, and what one worker answers in its place."""

    setup: Setup
    server: ServerProcess
    unsplit: list[dict[str, Any]]


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest,
    unsplit_answers: dict[str, list[dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """One server at a time."""
    setup: Setup = request.param
    with serving(tmp_path_factory.mktemp("pair") / "log", *FLAGS, *setup.flags) as server:
        yield Pair(setup=setup, server=server, unsplit=unsplit_answers[setup.kv_cache_dtype])


@pytest.mark.parametrize("pair", SETUPS, ids=str, indirect=True)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
async def test_eight_combinations(pair: Pair, is_warm: bool) -> None:
    setup, server = pair.setup, pair.server
    warmth = setup.warmth if is_warm else Warmth.COLD
    questions = make_questions(warmth.value)
    # 1. Warm up what the combination's name says.
    warm_ups = [question.warm_up(warmth) for question in questions if question.num_warm(warmth)]
    before = counts_of(server)
    async with http_client(server.url) as client:
        await ask_all(client, warm_ups)
        # 2. The answers are those of one worker: texts, tokens, log probabilities.
        answers = await ask_all(client, [question.body for question in questions])
    for question, ours, theirs in zip(questions, answers, pair.unsplit, strict=True):
        assert ours["choices"] == theirs["choices"], question
    # 3. What was cached is what the name says, and pages took the one way.
    for question, answer in zip(questions, answers, strict=True):
        num_cached = question.num_cached(warmth, setup.prefill_size) if setup.has_prefill_cache else 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached, question
    num_asked = sum(len(body["prompt"]) for body in warm_ups) + sum(len(question.prompt) for question in questions)
    num_cached = (
        0 if warmth is Warmth.PREFILL else sum(question.num_cached(warmth, setup.decode_size) for question in questions)
    )

    def counted() -> Counter[str]:
        return counts_of(server) - before

    def have_workers_told() -> bool:
        return counted()["asked"] >= num_asked and counted()[setup.way] >= len(questions)

    await until(have_workers_told, STATUS_TIMEOUT_S, "the workers' counts of tokens asked for and of page streams")
    counts = counted()
    assert counts.keys() <= {"asked", "cached", setup.way}
    assert (counts["asked"], counts["cached"]) == (num_asked, num_cached)


def counts_of(server: ServerProcess) -> Counter[str]:
    """Of the tokens of all prompts, how many decode was asked for and has found in its cache; page streams by transport."""
    streams = {
        transport: server.metric(metric_names.KV_TRANSFER_STREAMS_TOTAL, transport=transport)
        for transport in metric_names.TRANSPORTS
    }
    queries = server.metric(metric_names.PREFIX_CACHE_QUERIES_TOTAL, worker="decode-0")
    hits = server.metric(metric_names.PREFIX_CACHE_HITS_TOTAL, worker="decode-0")
    return Counter({name: int(count) for name, count in {"asked": queries, "cached": hits, **streams}.items()})
