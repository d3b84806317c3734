"""Replays a public trace of conversations against servers with and without the prefix cache: hit rate, time to the first token.

The trace is Mooncake's (see ``data/README.md``): arrival times, lengths, and for each block of 512 tokens an id that is the
same where the text up to its end is. Blocks are scaled down to 32 tokens and lengths with them, so that the longest prompt fits
the default model's window; a block's id gives its tokens. Time is scaled to a bounded rate. Each arm gets a server of its own
in every round, cold, and rounds begin with the one and the other in turn. Requests are sent when their time has come, whatever
is under way.

    .venv/bin/python -m benchmarks.prefix_cache --results benchmarks/results
    .venv/bin/python -m benchmarks.prefix_cache --rounds 1 --requests 10       # a trial
    .venv/bin/python -m benchmarks.prefix_cache -- --colocated                 # what follows -- goes to twinpool serve
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

import httpx

from benchmarks.engines.machine import commit, processor
from benchmarks.engines.spread import Spread
from benchmarks.token_gap import percentile, running_server
from llm_engine.page_hash import PageHash, num_cacheable_pages, page_hashes
from serving_core.engine_config import DEFAULT_PAGE_SIZE
from serving_core.metric_names import KV_TRANSFER_BYTES_TOTAL

TRACE = Path(__file__).parent / "data" / "mooncake_conversations.jsonl"
TRACED_BLOCK_TOKENS = 512
SCALE = 16
BLOCK_TOKENS = TRACED_BLOCK_TOKENS // SCALE
TICK_MS = 3000
"""The trace's times come in ticks of three seconds; literally, it would send ten requests at once and none for a while."""
_FIRST_ID, _LAST_ID = 1000, 40000  # ordinary words of the default model, none of its special tokens

WITHOUT, WITH = "without", "with"
_FLAGS = {WITHOUT: ["--no-enable-prefix-caching"], WITH: ["--enable-prefix-caching"]}
STATUS_S = 2.0
"""Workers tell their counters every second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """``send_at_s`` counts from the start."""

    send_at_s: float
    prompt: tuple[int, ...]
    num_answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``first_token_s`` counts from when the request was to be sent, ``num_cached`` tokens of the prompt were not computed."""

    first_token_s: float
    num_prompt: int
    num_cached: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One arm's replay. ``answers`` are None where a request failed; ``num_kv_bytes`` came to the decode workers."""

    arm: str
    answers: tuple[Answer | None, ...]
    num_kv_bytes: float

    @property
    def answered(self) -> list[Answer]:
        return [answer for answer in self.answers if answer is not None]

    @property
    def hit_rate(self) -> float:
        """Of the prompts' tokens."""
        return sum(answer.num_cached for answer in self.answered) / sum(answer.num_prompt for answer in self.answered)

    def first_token_s(self, share: float) -> float:
        return percentile([answer.first_token_s for answer in self.answered], share)


def read_trace(path: Path, *, rate: float, num_requests: int | None = None) -> list[TracedRequest]:
    """The first requests of the trace, at ``rate`` a second on average."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:num_requests]]
    times = spread_ticks([row["timestamp"] for row in rows])
    s_per_ms = len(rows) / rate / (times[-1] - times[0] + TICK_MS)
    return [
        TracedRequest(
            send_at_s=(at - times[0]) * s_per_ms,
            prompt=make_prompt(row["hash_ids"], -(-row["input_length"] // SCALE)),
            num_answer_tokens=-(-row["output_length"] // SCALE),
        )
        for at, row in zip(times, rows, strict=True)
    ]


def spread_ticks(timestamps: Sequence[int]) -> list[float]:
    """The times of a tick, evenly over it. ``timestamps`` ascend."""
    return [tick + TICK_MS * (place - timestamps.index(tick)) / timestamps.count(tick) for place, tick in enumerate(timestamps)]


def make_prompt(block_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Equal blocks have equal tokens; the last one is cut."""
    blocks = (random.Random(block_id).choices(range(_FIRST_ID, _LAST_ID), k=BLOCK_TOKENS) for block_id in block_ids)
    token_ids = tuple(token_id for block in blocks for token_id in block)
    assert num_tokens <= len(token_ids) < num_tokens + BLOCK_TOKENS, "a trace names every block of a prompt"
    return token_ids[:num_tokens]


def best_hit_rate(requests: Sequence[TracedRequest]) -> float:
    """Of a cache that has every page as soon as its request was sent, and never gives one up."""
    seen: set[PageHash] = set()
    num_hits = 0
    for request in requests:
        hashes = page_hashes(request.prompt, page_size=DEFAULT_PAGE_SIZE, salt=b"")
        cacheable = hashes[: num_cacheable_pages(len(request.prompt), DEFAULT_PAGE_SIZE)]
        num_hits += DEFAULT_PAGE_SIZE * sum(1 for _ in takewhile(seen.__contains__, cacheable))
        seen.update(hashes)
    return num_hits / sum(len(request.prompt) for request in requests)


async def take_turn(arm: str, url: str, requests: Sequence[TracedRequest]) -> Turn:
    """Replay the trace, after one request that warms the server up."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        await _ask(http, TracedRequest(send_at_s=0.0, prompt=tuple(range(500, 508)), num_answer_tokens=8), time.perf_counter())
        began = time.perf_counter()
        answers = await asyncio.gather(*(_ask_in_time(http, request, began) for request in requests))
        await asyncio.sleep(STATUS_S)
        metrics = (await http.get("/metrics")).text
    received = re.findall(rf'^{KV_TRANSFER_BYTES_TOTAL}\{{.*role="(?:decode|colocated)".*\}} (\S+)$', metrics, re.MULTILINE)
    return Turn(arm=arm, answers=tuple(answers), num_kv_bytes=sum(map(float, received)))


async def _ask_in_time(http: httpx.AsyncClient, request: TracedRequest, began: float) -> Answer | None:
    await asyncio.sleep(began + request.send_at_s - time.perf_counter())
    try:
        return await _ask(http, request, began + request.send_at_s)
    except (httpx.HTTPError, RuntimeError) as error:
        print(f"a request failed: {error!r}", file=sys.stderr)
        return None


async def _ask(http: httpx.AsyncClient, request: TracedRequest, due: float) -> Answer:
    """Raises ``httpx.HTTPError``, or ``RuntimeError`` when the stream ends with an error."""
    body = {
        "prompt": request.prompt,
        "max_tokens": request.num_answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_token_s: float | None = None
    text, usage = "", None
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                if first_token_s is None:
                    first_token_s = time.perf_counter() - due
                text += choice["text"]
            usage = chunk.get("usage") or usage
    if usage is None or first_token_s is None:
        raise RuntimeError("the stream ended without a token")
    return Answer(
        first_token_s=first_token_s,
        num_prompt=usage["prompt_tokens"],
        num_cached=usage["prompt_tokens_details"]["cached_tokens"],
        text=text,
    )


def make_report(turns: Sequence[Turn], requests: Sequence[TracedRequest], notes: Sequence[str]) -> str:
    """A Markdown table of medians over the rounds, ratios taken within a round."""
    arms = {arm: [turn for turn in turns if turn.arm == arm] for arm in (WITHOUT, WITH)}
    pairs = list(zip(arms[WITHOUT], arms[WITH], strict=True))
    lengths = [len(request.prompt) for request in requests]
    lines = [
        "# The prefix cache on a trace of conversations",
        "",
        *(f"- {note}" for note in notes),
        f"- {len(requests)} requests in {requests[-1].send_at_s:.0f} s; prompts of {min(lengths)} to {max(lengths)} tokens, "
        f"{sum(lengths) / len(lengths):.0f} on average",
        "",
        f"Median (lowest-highest) of {len(pairs)} rounds. A ratio is with to without, taken within a round. A cache without "
        f"limits and delays would hit {best_hit_rate(requests):.1%} of the prompts' tokens.",
        "",
        "| | without | with | ratio |",
        "|---|---|---|---|",
        _row("prompt tokens from prefill's cache, %", pairs, lambda turn: 100 * turn.hit_rate, digits=1),
        _row("KV received by decode, MB", pairs, lambda turn: turn.num_kv_bytes / 1e6),
        _row("first token p50, s", pairs, lambda turn: turn.first_token_s(0.5), digits=2),
        _row("first token p99, s", pairs, lambda turn: turn.first_token_s(0.99), digits=2),
        _row("requests that failed", pairs, lambda turn: float(turn.answers.count(None))),
        "",
        _describe_texts(turns),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, pairs: Sequence[tuple[Turn, Turn]], measure: Callable[[Turn], float], *, digits: int = 0) -> str:
    values = [(measure(without), measure(with_)) for without, with_ in pairs]
    ratios = [with_ / without if without else None for without, with_ in values]
    spreads = [Spread.of(column) for column in zip(*values, strict=True)]
    return f"| {name} | {' | '.join(_text(spread, digits) for spread in spreads)} | {_text(Spread.of(ratios), 2)} |"


def _text(spread: Spread | None, digits: int) -> str:
    return "-" if spread is None else spread.text(digits)


def _describe_texts(turns: Sequence[Turn]) -> str:
    """Whether all arms and rounds answered the same."""
    by_request = zip(*(turn.answers for turn in turns), strict=True)
    texts = [{answer.text for answer in answers if answer is not None} for answers in by_request]
    num_different = sum(len(of_request) > 1 for of_request in texts)
    if num_different:
        return f"{num_different} of {len(texts)} answers were not the same in all arms and rounds."
    return "Every answer was the same in all arms and rounds."


def draw(turns: Sequence[Turn], path: Path) -> None:
    """How many requests had their first token in time, and what it took by length. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 4.5), layout="constrained")
    shares, lengths = picture.subplots(1, 2)
    colours = {WITHOUT: "tab:orange", WITH: "tab:blue"}
    for number, turn in enumerate(turns):
        label = turn.arm if number < len(colours) else None
        ordered = sorted(answer.first_token_s for answer in turn.answered)
        steps = [(place + 1) / len(ordered) for place in range(len(ordered))]
        shares.step(ordered, steps, where="post", color=colours[turn.arm], alpha=0.8, label=label)
        points = [(answer.num_prompt, answer.first_token_s) for answer in turn.answered]
        lengths.scatter(*zip(*points, strict=True), s=8, color=colours[turn.arm], alpha=0.5, label=label)
    shares.set(title="First token in time, a line a round", xlabel="seconds", ylabel="share of requests", xscale="log")
    lengths.set(title="First token by length", xlabel="tokens of the prompt", ylabel="seconds", yscale="log")
    for axes in (shares, lengths):
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    picture.savefig(path, dpi=120)


def run(requests: Sequence[TracedRequest], num_rounds: int, serve_args: Sequence[str]) -> list[Turn]:
    """Every arm in every round, each with a server of its own."""
    turns: list[Turn] = []
    cores = os.sched_getaffinity(0)
    for number in range(num_rounds):
        for arm in (WITHOUT, WITH) if number % 2 == 0 else (WITH, WITHOUT):
            print(f"round {number + 1} of {num_rounds}: {arm}", file=sys.stderr, flush=True)
            os.sched_setaffinity(0, cores)
            with running_server([*_FLAGS[arm], *serve_args]) as url:
                # the client belongs on the cores that the server shares, not on decode's: see twinpool/core_plan.py
                os.sched_setaffinity(0, {min(cores)})
                turns.append(asyncio.run(take_turn(arm, url, requests)))
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--rate", type=float, default=0.4, help="requests a second (default: %(default)s)")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N of the trace")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each arm (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="folder for prefix_cache.md and .png (default: print the table)")
    parser.add_argument("serve_args", nargs="*", help="flags for the servers that are started")
    flags = parser.parse_args()
    requests = read_trace(flags.trace, rate=flags.rate, num_requests=flags.requests)
    turns = run(requests, flags.rounds, flags.serve_args)
    notes = [
        f"commit: {commit()}",
        f"machine: {processor(os.cpu_count() or 1)}",
        "versions: " + ", ".join(f"{name} {version(name)}" for name in ("torch", "ray", "grpcio")),
        f"command: `{shlex.join(['python', '-m', 'benchmarks.prefix_cache', *sys.argv[1:]])}`",
    ]
    report = make_report(turns, requests, notes)
    if flags.results is None:
        print(report, end="")
        return
    flags.results.mkdir(parents=True, exist_ok=True)
    Path(flags.results, "prefix_cache.md").write_text(report)
    try:
        draw(turns, flags.results / "prefix_cache.png")
    except ImportError:
        print("matplotlib is not there, so there is no plot", file=sys.stderr)


if __name__ == "__main__":
    main()
