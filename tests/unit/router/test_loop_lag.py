"""However large a request is, the event loop goes round: other streams and /health are not held up by it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from router.request_body import MAX_BODY_BYTES, MAX_BRACKETS
from tests.unit.router.front import make_front

LONG_PROMPT = "The quick brown fox, 123 times; " * 7_000  # 220 KB


@dataclass
class Lag:
    """The longest time, in seconds, that the loop kept a waiting task from running."""

    longest: float = 0.0


@contextlib.asynccontextmanager
async def measured_lag() -> AsyncIterator[Lag]:
    lag = Lag()

    async def measure() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            lag.longest = max(lag.longest, time.perf_counter() - before - 0.001)

    task = asyncio.create_task(measure())
    await asyncio.sleep(0.01)
    lag.longest = 0.0
    yield lag
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG_PROMPT, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [100] * 60_000, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_PROMPT}], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a few words"}] * 5_000, "max_tokens": 1}),
        ("/tokenize", {"prompt": LONG_PROMPT}),
        ("/detokenize", {"tokens": [100] * 60_000}),
    ],
)
async def test_a_long_prompt_does_not_hold_up_the_loop(path: str, body: dict[str, Any]) -> None:
    front = make_front(max_model_len=200_000)
    content = json.dumps(body).encode()
    await front.post(path, content)
    async with measured_lag() as lag:
        started_at = time.perf_counter()
        response = await front.post(path, content)
        seconds = time.perf_counter() - started_at
    assert response.status_code == 200
    print(f"{path}: {len(content)} bytes in {seconds:.3f} s, the loop at most {lag.longest:.4f} s late")
    assert lag.longest < 0.1


@pytest.mark.parametrize("num_bytes", [5 * 2**20, MAX_BODY_BYTES - 100, 27 * 2**20])
async def test_a_huge_body_is_refused_early(num_bytes: int) -> None:
    front = make_front(max_model_len=8192)
    body = {"messages": [{"role": "user", "content": "lorem ipsum dolor " * (num_bytes // 18)}]}
    content = json.dumps(body).encode()
    async with measured_lag() as lag:
        response = await front.post("/v1/chat/completions", content)
    assert response.status_code == (400 if num_bytes < MAX_BODY_BYTES else 413)
    print(f"{len(content)} bytes: the loop at most {lag.longest:.4f} s late")
    assert lag.longest < 0.5


async def test_the_worst_json_does_not_freeze_the_loop_for_a_second() -> None:
    front = make_front()
    for num_brackets, status in ((MAX_BRACKETS - 2, 400), (MAX_BODY_BYTES // 3 - 10, 413)):
        content = b'{"prompt":[' + b"[]," * num_brackets + b"5]}"
        async with measured_lag() as lag:
            response = await front.post("/v1/completions", content)
        assert response.status_code == status
        print(f"{len(content)} bytes of brackets: the loop at most {lag.longest:.4f} s late")
        assert lag.longest < 1.0
    content = b'{"prompt":[' + b"1," * (MAX_BODY_BYTES // 2 - 10) + b"5]}"
    async with measured_lag() as lag:
        response = await front.post("/v1/completions", content)
    assert response.status_code == 400
    print(f"{len(content)} bytes of numbers: the loop at most {lag.longest:.4f} s late")
    assert lag.longest < 1.0
