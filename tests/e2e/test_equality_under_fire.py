"""Undisturbed = under fire: on pools so small that sequences are evicted, and with a decode worker killed at random in every
tenth request, every answer has the tokens that it has on a server at peace.

``TWINPOOL_NUM_PROMPTS`` sets how many of the prompts are asked at most (all by default; 20 make a trial).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import MODEL, START_TIMEOUT_S, ServerProcess, serving, until
from tests.e2e.streams import Stream, http_client, run_generation, run_stream
from tests.equality_prompts import mt_bench_turns, prompts_of_lengths
from twinpool.model_source import find_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(7200)]

NUM_PROMPTS = 129
"""Every length from 1 to 49, and 80 turns of MT-bench."""
MAX_NUM_PROMPTS = int(os.environ.get("TWINPOOL_NUM_PROMPTS", f"{NUM_PROMPTS}"))
NUM_TOKENS = 64
NUM_CLIENTS = 16
KILL_EVERY = 10
LEASE_S = 6.0
RESTART_TIMEOUT_S = 60.0
AMPLE_POOL = "512MiB"
SERVER_FLAGS = ("--lease-seconds", f"{LEASE_S:g}", "--max-model-len", "480", "--prefill-workers", "1", "--decode-workers", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Greedy ones are asked for log probabilities and seeded ones for token ids, since no path gives both. Each has a salt of
    its own: from the cache it gets what its own attempts have left, and not the pages of another's answer that goes on like
    its prompt, which decode has computed in its own form of the weights."""

    name: str
    prompt: tuple[int, ...]
    seed: int | None

    async def ask(self, client: httpx.AsyncClient, stream: Stream) -> None:
        common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "cache_salt": self.name}
        if self.seed is None:
            await run_stream(client, stream, self.prompt, logprobs=2, stream_options={"include_usage": True}, **common)
        else:
            sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": self.seed}
            await run_generation(client, stream, self.prompt, **sampling, **common)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """``victim`` dies once the stream that it is planned for has ``num_tokens``; 0 is while its prompt is computed."""

    victim: str
    num_tokens: int


class Fire:
    """The kills, by the place of the question in the order of asking. One at a time: the next question of the plan is asked
    when the last victim has been replaced."""

    def __init__(self, server: ServerProcess, plan: dict[int, Kill]) -> None:
        self._server = server
        self._plan = plan
        self._turn = asyncio.Lock()

    async def ask(self, client: httpx.AsyncClient, place: int, question: Question, stream: Stream) -> None:
        kill = self._plan.get(place)
        if kill is None:
            await question.ask(client, stream)
            return
        async with self._turn, asyncio.TaskGroup() as both:
            both.create_task(question.ask(client, stream))
            both.create_task(self._strike(kill, question, stream))

    async def _strike(self, kill: Kill, question: Question, stream: Stream) -> None:
        await stream.reach(kill.num_tokens)
        worker = self._server.workers()[kill.victim]
        os.kill(worker["pid"], signal.SIGKILL)
        is_replaced = partial(self._server.is_replaced, kill.victim, worker["incarnation"])
        restart_s = await until(is_replaced, RESTART_TIMEOUT_S, f"{kill.victim} to be back")
        print(f"{kill.victim} killed after {kill.num_tokens:2} tokens of {question.name}, back in {restart_s:.1f} s")


def counts_of(stream: Stream) -> dict[str, int]:
    """The usage without what was cached, which depends on what had gone before."""
    return {name: count for name, count in (stream.usage or {}).items() if name != "prompt_tokens_details"}


def make_questions(num_prompts: int) -> list[Question]:
    """Each prompt greedily, and with a seed of its own; where not all are asked, some of either kind."""
    model = find_model(MODEL).path
    prompts = [*prompts_of_lengths(model, range(1, 50)), *mt_bench_turns(model, 80)]
    assert len(prompts) == NUM_PROMPTS
    chosen = [number * NUM_PROMPTS // num_prompts for number in range(num_prompts)]
    return [
        Question(name=f"prompt {number} {kind}", prompt=prompts[number], seed=seed)
        for number in chosen
        for kind, seed in (("greedy", None), ("seeded", 1000 + number))
    ]


async def ask_all(server: ServerProcess, questions: Sequence[Question], fire: Fire) -> list[Stream]:
    """All answers, read by a few clients which take the questions in order."""
    streams = [Stream() for _ in questions]
    places: Iterator[int] = iter(range(len(questions)))

    async def take_from(client: httpx.AsyncClient) -> None:
        for place in places:
            await fire.ask(client, place, questions[place], streams[place])

    async with http_client(server.url) as client, asyncio.TaskGroup() as clients:
        for _ in range(NUM_CLIENTS):
            clients.create_task(take_from(client))
    return streams


def num_placed(server: ServerProcess, reason: str) -> float:
    """How often a sequence was placed again. Counted by the router, while a worker's own counters die with it."""
    return server.metric("twinpool:pd_decision_total", reason=reason)


@pytest.mark.parametrize(
    ("dtype", "small_pool", "num_prompts"),  # 31 pages, while one sequence takes up to 30
    [("bfloat16", "11MiB", NUM_PROMPTS), ("float32", "22MiB", NUM_PROMPTS // 3)],
    ids=("bfloat16", "float32"),
)
async def test_undisturbed_equals_under_fire(dtype: str, small_pool: str, num_prompts: int, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    questions = make_questions(min(num_prompts, MAX_NUM_PROMPTS))
    rng.shuffle(questions)
    # 1. undisturbed
    flags = (*SERVER_FLAGS, "--dtype", dtype)
    with serving(tmp_path / "log-undisturbed", *flags, "--kv-cache-memory-bytes", AMPLE_POOL) as server:
        undisturbed = await ask_all(server, questions, Fire(server, {}))
        assert num_placed(server, "eviction") == num_placed(server, "retry") == 0
    assert [(stream.error, stream.is_done) for stream in undisturbed] == [(None, True)] * len(questions)
    # 2. the same under fire
    plan = {
        place: Kill(victim=rng.choice(("decode-0", "decode-1")), num_tokens=rng.randrange(undisturbed[place].num_tokens))
        for place in range(KILL_EVERY - 1, len(questions), KILL_EVERY)
    }
    with serving(tmp_path / "log-under-fire", *flags, "--kv-cache-memory-bytes", small_pool) as server:
        await until(server.are_all_ready, START_TIMEOUT_S, "every worker to be ready")
        under_fire = await ask_all(server, questions, Fire(server, plan))
        num_evictions, num_retries = num_placed(server, "eviction"), num_placed(server, "retry")
        await until(server.is_at_rest, 3 * LEASE_S, "all pages to be free again")
    print(f"{len(questions)} questions, {len(plan)} kills, {num_retries:.0f} retries, {num_evictions:.0f} evictions")
    # 3. equal in all that a client can learn
    for question, ours, theirs in zip(questions, under_fire, undisturbed, strict=True):
        assert (ours.error, ours.is_done) == (None, True), question.name
        assert ours.token_ids == theirs.token_ids, question.name
        assert ours.logprobs == theirs.logprobs, question.name
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason), question.name
        assert counts_of(ours) == counts_of(theirs), question.name
        assert ours.num_tokens == (ours.usage or {})["completion_tokens"], question.name
    # 4. and it was a fire
    assert num_retries >= len(plan) > 0
    assert num_evictions >= len(questions) / 20
