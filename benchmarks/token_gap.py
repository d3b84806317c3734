"""Measures the gap between tokens of running streams, alone and while long prompts arrive.

Four streams of 150 tokens, started again and again; in the second half, prompts of about 1,000 tokens arrive at 0.4 a second.
A gap is the time between two tokens of one stream as its client reads them, so the router and the client's own work are in it.

    .venv/bin/python benchmarks/token_gap.py                      # starts a server of its own
    .venv/bin/python benchmarks/token_gap.py --url http://127.0.0.1:8000
    .venv/bin/python benchmarks/token_gap.py -- --colocated       # what follows -- goes to twinpool serve
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

NUM_STREAMS = 4
STREAM_TOKENS = 150
PROMPTS_PER_S = 0.4
PROMPT_WORDS = 750  # about 1,000 tokens of these words
START_TIMEOUT_S = 120.0
_WORDS = ["river", "stone", "market", "winter", "engine", "paper", "garden", "letter", "harbour", "copper", "lantern", "meadow"]


@dataclass(slots=True)
class Measurement:
    """What one half of the run saw. ``gaps_s`` of all streams together; ``first_token_s`` of the long prompts."""

    gaps_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    num_prompts: int = 0
    num_failed: int = 0


class Client:
    """Streams completions from one server."""

    def __init__(self, url: str, model: str, http: httpx.AsyncClient) -> None:
        self._url = url
        self._model = model
        self._http = http

    async def token_times(self, prompt: str, num_tokens: int) -> AsyncIterator[float]:
        """When each token's text arrived. Raises ``httpx.HTTPError`` or ``RuntimeError`` when the stream fails."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        async with self._http.stream("POST", f"{self._url}/v1/completions", json=body | {"temperature": 0}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                if any(choice["text"] for choice in chunk["choices"]):
                    yield time.perf_counter()


async def measure(client: Client, seconds: float, *, has_prompts: bool, seed: int) -> Measurement:
    """Run the streams for ``seconds``, with long prompts arriving when ``has_prompts``."""
    seen = Measurement()
    end = time.perf_counter() + seconds
    parts = [_stream_again_and_again(client, seen, end, number) for number in range(NUM_STREAMS)]
    if has_prompts:
        parts.append(_send_prompts(client, seen, end, random.Random(seed)))
    await asyncio.gather(*parts)
    return seen


async def _stream_again_and_again(client: Client, seen: Measurement, end: float, number: int) -> None:
    for turn in itertools.count():
        before: float | None = None
        try:
            async for now in client.token_times(f"Story {number}.{turn}: Once upon a time", STREAM_TOKENS):
                if now >= end:
                    return
                if before is not None:
                    seen.gaps_s.append(now - before)
                before = now
        except (httpx.HTTPError, RuntimeError):
            seen.num_failed += 1
        if time.perf_counter() >= end:
            return


async def _send_prompts(client: Client, seen: Measurement, end: float, rng: random.Random) -> None:
    async with asyncio.TaskGroup() as tasks:
        while time.perf_counter() + 1 / PROMPTS_PER_S < end:
            await asyncio.sleep(1 / PROMPTS_PER_S)
            seen.num_prompts += 1
            tasks.create_task(_send_prompt(client, seen, " ".join(rng.choices(_WORDS, k=PROMPT_WORDS))))


async def _send_prompt(client: Client, seen: Measurement, prompt: str) -> None:
    sent = time.perf_counter()
    try:
        async for now in client.token_times(prompt, 1):
            seen.first_token_s.append(now - sent)
            return
    except (httpx.HTTPError, RuntimeError):
        seen.num_failed += 1


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of ``values`` do not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def make_report(idle: Measurement, busy: Measurement, command: str) -> str:
    """A Markdown table with where and how it was measured."""
    lines = [
        f"- commit: {_commit()}",
        f"- machine: {_machine()}",
        f"- command: `{command}`",
        "",
        "| load | gaps | p50 ms | p99 ms | max ms | long prompts | their first token p50 s | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, seen in (("4 streams", idle), (f"4 streams + {PROMPTS_PER_S} long prompts/s", busy)):
        p50, p99 = (1e3 * percentile(seen.gaps_s, share) for share in (0.5, 0.99))
        longest = 1e3 * max(seen.gaps_s, default=float("nan"))
        first = f"{percentile(seen.first_token_s, 0.5):.2f}" if seen.first_token_s else "-"
        lines.append(
            f"| {name} | {len(seen.gaps_s)} | {p50:.1f} | {p99:.1f} | {longest:.1f} | {seen.num_prompts} | {first} "
            f"| {seen.num_failed} |"
        )
    return "\n".join(lines)


def _commit() -> str:
    answer = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def _machine() -> str:
    models = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{os.cpu_count()} cores, {models[0] if models else platform.processor()}, Python {platform.python_version()}"


@contextmanager
def running_server(serve_args: list[str]) -> Iterator[str]:
    """A server of our own on a free port; yields its URL once it is ready, and drains it afterwards."""
    command = [sys.executable, "-m", "twinpool.cli", "serve", "--port", "0", *serve_args]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("listening on "):
                url = line.removeprefix("listening on ").strip()
                break
        else:
            raise SystemExit("the server ended before it listened")
        _wait_ready(url)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def _wait_ready(url: str) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        if httpx.get(f"{url}/ready").status_code == 200:
            return
        time.sleep(0.2)
    raise SystemExit(f"{url} was not ready within {START_TIMEOUT_S:g} s")


async def run(url: str, seconds: float, seed: int) -> tuple[Measurement, Measurement]:
    """Both halves, after one stream that warms the server up."""
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        model = (await http.get(f"{url}/v1/models")).raise_for_status().json()["data"][0]["id"]
        client = Client(url, model, http)
        async for _ in client.token_times("Warm", 8):
            pass
        idle = await measure(client, seconds, has_prompts=False, seed=seed)
        busy = await measure(client, seconds, has_prompts=True, seed=seed)
    return idle, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server (default: start one)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each half")
    parser.add_argument("--seed", type=int, default=0, help="of the long prompts' words")
    parser.add_argument("serve_args", nargs="*", help="flags for the server that is started")
    flags = parser.parse_args()
    command = shlex.join(["benchmarks/token_gap.py", *sys.argv[1:]])
    if flags.url:
        idle, busy = asyncio.run(run(flags.url.rstrip("/"), flags.seconds, flags.seed))
    else:
        with running_server(flags.serve_args) as url:
            # the client belongs on the cores that the server shares, not on decode's: see twinpool/core_plan.py
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            idle, busy = asyncio.run(run(url, flags.seconds, flags.seed))
    print(make_report(idle, busy, command))


if __name__ == "__main__":
    main()
