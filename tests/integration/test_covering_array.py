"""Split = unsplit, whatever way the pages take, how large they are, what is cached where, how long the prompt is, how it is
sampled and of what type the KV cache is: any two values of any two of these meet.

Servers are the covering array of what a server is started with; each of them answers the covering array of the rest.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from serving_core import metric_names
from serving_core.generate_request import GenerateRequest
from serving_core.kv_page_layout import KVDType
from tests.integration.in_process_server import Answer, InProcessServer
from tests.integration.served_model import MAX_NUM_PROMPTS, ServedModel, make_prompt, make_request
from tests.pairwise import missing_pairs, pairwise
from twinpool.transfer_way import TransferWay

WAYS = (TransferWay.GRPC, TransferWay.SHARED_MEMORY, TransferWay.TORCH_DISTRIBUTED)
PAGE_SIZES = (8, 16, 32)
CACHE_DTYPES = (KVDType.FLOAT32, KVDType.INT8)
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)
TEMPERATURES = (0.0, 0.9)


class Warmth(enum.Enum):
    """What is cached where when the prompt comes."""

    COLD = "cold"
    PREFILL = "prefill has all of it"
    DECODE_HALF = "decode has half of it"
    DECODE = "decode has all of it"
    BOTH_HALF = "both have half of it"
    BOTH = "both have all of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A server: a pair whose pages go one ``way``, or one worker with both phases, whose pages go none."""

    way: TransferWay | None
    prefill_size: int
    decode_size: int
    cache_dtype: KVDType

    def __str__(self) -> str:
        way = self.way.value if self.way else "colocated"
        return f"{way}-{self.prefill_size}to{self.decode_size}-{self.cache_dtype.value}"

    @property
    def page_sizes(self) -> dict[str, int]:
        if self.way is None:
            return {"colocated-0": self.decode_size}
        return {"prefill-0": self.prefill_size, "decode-0": self.decode_size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``number`` makes its prompt differ from all others in its first token."""

    number: int
    setup: Setup
    warmth: Warmth
    length: int
    temperature: float

    @property
    def prompt(self) -> tuple[int, ...]:
        return make_prompt(self.number, self.length)

    def request(self, when: str = "row", *, salt: bytes = b"") -> GenerateRequest:
        return make_request(f"{when}-{self.number}", self.prompt, temperature=self.temperature, salt=salt)

    @property
    def num_warm(self) -> int:
        """Tokens of the prompt that are asked before it."""
        shares = {Warmth.COLD: 0, Warmth.DECODE_HALF: self.length // 2, Warmth.BOTH_HALF: self.length // 2}
        return shares.get(self.warmth, self.length)

    @property
    def num_cached_by_prefill(self) -> int:
        """Tokens. One worker with both phases has what its decode phase has."""
        if self.setup.way is None:
            return self.num_cached_by_decode
        return 0 if self.warmth in (Warmth.DECODE_HALF, Warmth.DECODE) else self._num_cached(self.setup.prefill_size)

    @property
    def num_cached_by_decode(self) -> int:
        return 0 if self.warmth is Warmth.PREFILL else self._num_cached(self.setup.decode_size)

    def _num_cached(self, page_size: int) -> int:
        """Those of full pages, but for the page with the prompt's last token."""
        return min(self.num_warm // page_size, (self.length - 1) // page_size) * page_size


PAIRS = [
    Setup(way=way, prefill_size=ours, decode_size=theirs, cache_dtype=dtype)
    for way, ours, theirs, dtype in pairwise(WAYS, PAGE_SIZES, PAGE_SIZES, CACHE_DTYPES)
]
WARMTHS_OF_ONE = (Warmth.COLD, Warmth.BOTH_HALF, Warmth.BOTH)
ONES = [
    (Setup(way=None, prefill_size=size, decode_size=size, cache_dtype=dtype), *rest)
    for size, dtype, *rest in pairwise(PAGE_SIZES, CACHE_DTYPES, WARMTHS_OF_ONE, LENGTHS, TEMPERATURES)
]
ROWS = [
    Row(number=number, setup=setup, warmth=warmth, length=length, temperature=temperature)
    for number, (setup, warmth, length, temperature) in enumerate(
        [*pairwise(PAIRS, tuple(Warmth), LENGTHS, TEMPERATURES), *ONES]
    )
]
SETUPS = tuple(dict.fromkeys(row.setup for row in ROWS))


def test_any_two_values_meet() -> None:
    def values(rows: Sequence[Row]) -> list[tuple[object, ...]]:
        setups = [(row.setup.way, row.setup.prefill_size, row.setup.decode_size, row.setup.cache_dtype) for row in rows]
        return [(*setup, row.warmth, row.length, row.temperature) for setup, row in zip(setups, rows, strict=True)]

    assert len(ROWS) <= MAX_NUM_PROMPTS
    pairs = values([row for row in ROWS if row.setup.way is not None])
    assert missing_pairs(pairs, WAYS, PAGE_SIZES, PAGE_SIZES, CACHE_DTYPES, tuple(Warmth), LENGTHS, TEMPERATURES) == set()
    ones = [(size, *rest) for way, size, _, *rest in values(ROWS) if way is None]
    assert missing_pairs(ones, PAGE_SIZES, CACHE_DTYPES, WARMTHS_OF_ONE, LENGTHS, TEMPERATURES) == set()


@pytest.fixture(scope="module")
def unsplit(tiny_model: ServedModel) -> dict[int, Answer]:
    """What each row is to answer."""

    async def ask_all() -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        for dtype in CACHE_DTYPES:
            rows = [row for row in ROWS if row.setup.cache_dtype is dtype]
            engine = replace(tiny_model.engine, kv_cache_dtype=dtype)
            theirs = await tiny_model.answers_without_cache([row.request() for row in rows], engine=engine)
            answers.update(zip((row.number for row in rows), theirs, strict=True))
        return answers

    return asyncio.run(ask_all())


@pytest.mark.parametrize("setup", SETUPS, ids=str)
async def test_split_equals_unsplit(tiny_model: ServedModel, unsplit: dict[int, Answer], setup: Setup) -> None:
    engine = replace(tiny_model.engine, kv_cache_dtype=setup.cache_dtype)
    transfer = setup.way or TransferWay.AUTO
    rows = [row for row in ROWS if row.setup == setup]
    async with tiny_model.server(setup.page_sizes, engine=engine, transfer=transfer) as server:
        # 1. One by one, and what was counted is what the row's name says.
        for row in rows:
            await warm_up(server, row)
            before = await counts_of(server)
            answer = await server.generate(row.request())
            assert answer == unsplit[row.number], row  # log probabilities too, bit for bit
            assert answer.num_cached_tokens == row.num_cached_by_prefill, row
            assert await counts_of(server) - before == expected_counts(server, row), row
        # 2. All at once where all of it is cached, then where nothing is.
        for when, salt in (("again", b""), ("salted", b"salt")):
            answers = await server.generate_all([row.request(when, salt=salt) for row in rows])
            assert answers == [unsplit[row.number] for row in rows]


async def warm_up(server: InProcessServer, row: Row) -> None:
    """Ask the beginning of its prompt. One token is not handed over, so that decode learns nothing of its prompt."""
    if row.num_warm == 0:
        return
    max_tokens = 1 if row.warmth is Warmth.PREFILL else 2
    await server.generate(make_request(f"warm-{row.number}", row.prompt[: row.num_warm], max_tokens=max_tokens))
    await server.assert_no_leaks()  # nothing of it is under way any more, and counted later
    if row.warmth in (Warmth.DECODE_HALF, Warmth.DECODE):
        await server.forget_prompts("prefill-0")


async def counts_of(server: InProcessServer) -> Counter[str]:
    """Of the prompt: what prefill has computed, what decode has found in its cache and received, and over which ways."""
    prefill, decode = next(iter(server.workers)), next(reversed(server.workers))
    computed, received = await server.counters(prefill), await server.counters(decode)
    return Counter(
        computed=computed[metric_names.PROMPT_TOKENS_TOTAL],
        cached=received[metric_names.PREFIX_CACHE_HITS_TOTAL],
        received_bytes=received[metric_names.KV_TRANSFER_BYTES_TOTAL],
        **await server.num_page_streams(prefill),
    )


def expected_counts(server: InProcessServer, row: Row) -> Counter[str]:
    counts = Counter(computed=row.length - row.num_cached_by_prefill, cached=row.num_cached_by_decode)
    if row.setup.way is not None:
        layout = server.workers["decode-0"].hello.layout
        num_pages = layout.num_pages_for(row.length) - row.num_cached_by_decode // layout.page_size
        counts += Counter({"received_bytes": num_pages * layout.page_bytes, row.setup.way.value: 1})
    return counts
