"""Mixed load for a long time: memory stays flat, every page is accounted for, every answer ends as it should.

``TWINPOOL_SOAK_MINUTES`` sets how long (30 by default; 3 make a trial).
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_memory import MAX_GROWTH_BYTES, ServerMemory, in_mib
from tests.e2e.server_process import serving, until
from tests.e2e.streams import Stream, completion_body, http_client, run_stream

MINUTES = float(os.environ.get("TWINPOOL_SOAK_MINUTES", "30"))
NUM_CLIENTS = 12
MAX_PROMPT_WORDS = 1500
WORDS = ("tell", "me", "why", "the", "river", "is", "7", "blue", "über", "雨")
MAX_TOKENS = 200
LEAVING_SHARE = 0.15
SAMPLE_EVERY_S = 10.0
LEASE_S = 6.0
POOL = "96MiB"
"""About 4,300 tokens of the default model: a few of the largest sequences, so that some are evicted."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.05, "n": 2},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "temperature": 0.8},
    {"logprobs": 5, "logit_bias": {str(token): 5 for token in range(1000, 1100)}},
    {"stop": [".", "\n"], "ignore_eos": True},
    {"min_tokens": 1, "stop_token_ids": [28, 30]},
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(60 * MINUTES + 600)]


async def watch(memory: ServerMemory, samples: list[dict[str, int]]) -> None:
    """Never ends by itself."""
    while True:
        samples.append(memory.resident_bytes())
        await asyncio.sleep(SAMPLE_EVERY_S)


def growth_bytes(samples: Sequence[dict[str, int]]) -> dict[str, int]:
    """From the second third of the time to the last one, of the median. The first third fills caches and arenas."""
    third = len(samples) // 3
    middle, last = samples[third:-third], samples[-third:]
    return {
        name: int(statistics.median(each[name] for each in last) - statistics.median(each[name] for each in middle))
        for name in samples[0]
    }


async def ask_until(end: float, client: httpx.AsyncClient, rng: random.Random, endings: Counter[str]) -> None:
    """One request after another, each of another kind, some of them left."""
    while time.monotonic() < end:
        prompt = " ".join(rng.choices(WORDS, k=_num_words(rng)))
        options = {**rng.choice(OPTIONS), "max_tokens": rng.randint(1, MAX_TOKENS), "seed": rng.randrange(2**31)}
        if rng.random() < LEAVING_SHARE:
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0, 3)):
                    await run_stream(client, Stream(), prompt, **options)
            endings["left"] += 1
        elif rng.random() < 0.5:
            stream = await run_stream(client, Stream(), prompt, **options)
            endings[str((stream.error or {}).get("code") or stream.finish_reason)] += 1
        else:
            answer = await client.post("/v1/completions", json=completion_body(prompt, **options))
            assert answer.status_code == 200, answer.text
            endings.update(choice["finish_reason"] for choice in answer.json()["choices"])


def _num_words(rng: random.Random) -> int:
    """Many short ones and a few long ones."""
    return max(1, int(MAX_PROMPT_WORDS * rng.random() ** 4))


async def test_mixed_load_leaves_memory_flat(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    endings: Counter[str] = Counter()
    flags = ("--lease-seconds", f"{LEASE_S:g}", "--max-model-len", "3072", "--kv-cache-memory-bytes", POOL)
    with serving(tmp_path / "log", *flags) as server:
        samples: list[dict[str, int]] = []
        watching = asyncio.create_task(watch(ServerMemory(server), samples))
        end = time.monotonic() + 60 * MINUTES
        async with http_client(server.url) as client, asyncio.TaskGroup() as clients:
            for number in range(NUM_CLIENTS):
                clients.create_task(ask_until(end, client, random.Random(seed + number), endings))
        assert not watching.done(), "a process of the server has ended"
        watching.cancel()
        await until(server.is_at_rest, 2 * LEASE_S, "all pages to be free or cached")
        num_tokens = server.metric("twinpool:generation_tokens_total")
        num_evictions = server.metric("twinpool:pd_decision_total", reason="eviction")
    growth = growth_bytes(samples)
    print(f"{dict(endings)}; {num_tokens:.0f} tokens, {num_evictions:.0f} evictions; growth in MiB {in_mib(growth)}")
    assert set(endings) <= {"stop", "length", "left"}, endings
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert max(growth.values()) <= MAX_GROWTH_BYTES, growth
