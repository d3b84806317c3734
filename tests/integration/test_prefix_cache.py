"""Prompts that begin alike: an answer's pages for the next turn, a pool too small for all of it, and what the usage tells.
Every mix of cached and not: ``test_covering_array``."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import httpx
import pytest

from serving_core import metric_names
from serving_core.kv_page_layout import KVDType
from serving_core.page_state import PageState
from tests.equality_prompts import mt_bench_turns
from tests.integration.in_process_server import InProcessServer
from tests.integration.served_model import NUM_TOKENS, ServedModel, make_prompt, make_request
from twinpool.model_source import DEFAULT_MODEL, find_model

MAX_LOGPROB_DIFFERENCE = 1e-4


@pytest.mark.parametrize("workers", [{"prefill-0": 16, "decode-0": 8}, {"colocated-0": 8}], ids=["pair", "one"])
async def test_the_next_turn_begins_with_the_answer(tiny_model: ServedModel, workers: dict[str, int]) -> None:
    """The answer's pages were computed by decode: equal tokens, and numbers as near as float32 has them."""
    async with tiny_model.server(workers) as server:
        first = make_request("first", make_prompt(1, 21))
        answer = await server.generate(first)
        second = make_request("second", (*first.prompt_token_ids, *answer.token_ids, 9, 8, 7))
        *_, with_decode = server.workers
        again = await server.generate(second)
        num_hits = (await server.counters(with_decode))[metric_names.PREFIX_CACHE_HITS_TOTAL]
        assert num_hits == 32  # of 21 + 11 computed with
    (expected,) = await tiny_model.answers_without_cache([second])
    assert again.token_ids == expected.token_ids
    for ours, theirs in zip(again.logprobs, expected.logprobs, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.logprob == pytest.approx(theirs.logprob, abs=MAX_LOGPROB_DIFFERENCE)


@pytest.mark.parametrize("workers", [{"prefill-0": 8, "decode-0": 16}, {"colocated-0": 16}], ids=["pair", "one"])
async def test_many_that_begin_alike_on_a_small_pool(tiny_model: ServedModel, workers: dict[str, int]) -> None:
    """So small that cached pages are given up all the time, and sequences evicted."""
    page_bytes = tiny_model.loaded.config.page_layout(page_size=16, dtype=KVDType.FLOAT32).page_bytes
    engine = replace(tiny_model.engine, max_model_len=128, kv_cache_memory_bytes=14 * page_bytes, max_num_seqs=16)
    prompts = [
        (*make_prompt(beginning, num_common), *make_prompt(50 + number, 1 + number % 5))
        for number, (beginning, num_common) in enumerate(itertools.product((1, 2, 3), (15, 32, 47, 16, 33, 64)))
    ]
    requests = [make_request(f"r{number}", prompt, max_tokens=40) for number, prompt in enumerate(prompts)]
    async with tiny_model.server(workers, engine=engine) as server:
        answers = await server.generate_all(requests)
        for worker in server.workers:
            assert (await server.counters(worker))[metric_names.PREFIX_CACHE_HITS_TOTAL] > 0
    assert answers == await tiny_model.answers_without_cache(requests)


@pytest.mark.parametrize("workers", [{"prefill-0": 16, "decode-0": 32}, {"colocated-0": 16}], ids=["pair", "one"])
async def test_cached_pages_have_the_bits_of_fresh_ones_in_bfloat16(workers: dict[str, int]) -> None:
    """The default model, prefill and decode with the forms of the weights that a server gives them."""
    model = ServedModel.load(find_model(DEFAULT_MODEL).path, KVDType.BFLOAT16)
    async with model.server(workers) as server:
        for number, prompt in enumerate(mt_bench_turns(model.path, 3)):
            beginning = await server.generate(make_request(f"beginning-{number}", prompt[: len(prompt) // 2], salt=b"warm"))
            assert len(beginning.token_ids) == NUM_TOKENS
            cold = await server.generate(make_request(f"cold-{number}", prompt))
            half = await server.generate(make_request(f"half-{number}", prompt, salt=b"warm"))
            full = await server.generate(make_request(f"full-{number}", prompt))
            assert cold == half == full
            assert half.num_cached_tokens == len(prompt) // 2 // 16 * 16
            assert full.num_cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize(
    "workers", [{"prefill-0": 16, "prefill-1": 16, "decode-0": 16, "decode-1": 16}, {"colocated-0": 16}], ids=["pairs", "one"]
)
async def test_every_worker_has_the_warm_prompts_before_it_serves(tiny_model: ServedModel, workers: dict[str, int]) -> None:
    warm = (make_prompt(1, 40), make_prompt(2, 17))
    async with tiny_model.server(workers, warm_prompts=warm) as server:
        async with asyncio.timeout(30):
            while any(worker["state"] != "ready" for worker in await workers_of(server)):  # noqa: ASYNC110 - a page to look at
                await asyncio.sleep(0.01)
        for worker in server.workers.values():
            assert (await worker.read_pages(True)).counts[PageState.CACHED] >= 3  # of 16 tokens: 2 + 1
        # as many requests at once as there are pairs, so that each worker gets one of them
        for number, prompt in enumerate(warm):
            begun = [make_request(f"r{number}-{i}", (*prompt, 200 + i, 3, 4)) for i in range(len(workers) // 2 or 1)]
            answers = await asyncio.gather(*(server.generate(request) for request in begun))
            assert [answer.num_cached_tokens for answer in answers] == [len(prompt) // 16 * 16] * len(begun)
            assert list(answers) == await tiny_model.answers_without_cache(begun)
        await server.assert_no_leaks()


async def workers_of(server: InProcessServer) -> list[dict[str, object]]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.router.app), base_url="http://router") as client:
        return list((await client.get("/admin/workers")).json()["workers"])


async def test_usage_over_http(tiny_model: ServedModel) -> None:
    async with (
        tiny_model.server({"prefill-0": 16, "decode-0": 16}) as server,
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
