"""Clients that leave at random moments."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import httpx

from tests.e2e.streams import Stream, completion_body, run_stream

NUM_AT_ONCE = 10
LONGEST_STAY_S = 1.5


async def visit_and_leave(client: httpx.AsyncClient, num_requests: int, rng: random.Random) -> None:
    """Requests with prompts of 1 to 600 words, streamed or not, each left after at most ``LONGEST_STAY_S``, a few at a time."""
    visits = [(rng.uniform(0, LONGEST_STAY_S), rng.randint(1, 600), rng.random() < 0.5) for _ in range(num_requests)]
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
