"""Clients that leave at any moment leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import httpx
import pytest

from tests.e2e.server_process import ServerProcess, until
from tests.e2e.streams import Stream, completion_body, http_client, run_stream

pytestmark = pytest.mark.e2e

NUM_REQUESTS = 100
NUM_AT_ONCE = 10
LONGEST_STAY_S = 1.5


async def test_100_disconnects_at_random_moments(server: ServerProcess) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    visits = [(rng.uniform(0, LONGEST_STAY_S), rng.randint(1, 600), rng.random() < 0.5) for _ in range(NUM_REQUESTS)]
    async with http_client(server.url) as client:
        places = asyncio.Semaphore(NUM_AT_ONCE)

        async def visit(stay_s: float, num_words: int, is_stream: bool) -> None:
            async with places:
                with suppress(TimeoutError, httpx.HTTPError):
                    async with asyncio.timeout(stay_s):
                        prompt = "word " * num_words
                        if is_stream:
                            await run_stream(client, Stream(), prompt, max_tokens=200, ignore_eos=True)
                        else:
                            body = completion_body(prompt, max_tokens=200, ignore_eos=True)
                            await client.post("/v1/completions", json=body)

        await asyncio.gather(*(visit(*each) for each in visits))
        took_s = await until(server.is_at_rest, 5, f"all pages to be free or cached (seed {seed})")
        print(f"at rest after {took_s:.2f} s")
        answer = await client.post("/v1/completions", json=completion_body("Hello", max_tokens=4))
        assert answer.status_code == 200
