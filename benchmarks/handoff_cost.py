"""Measures what a hand-off costs a request that has the server for itself: the pair beside the same engine with both phases.

Two servers with the same flags run side by side, one with a prefill and a decode worker, one with a worker for both
(``--colocated``), and are asked in turn, one request at a time. Two questions: how much later comes the first token, and is the
gap from it to the second one longer than a decode step and the exposed part of the transfer.

    .venv/bin/python -m benchmarks.handoff_cost
    .venv/bin/python -m benchmarks.handoff_cost --rounds 1 --requests 2 --prompts 64 --results /tmp      # a trial
    .venv/bin/python -m benchmarks.handoff_cost -- --transfer grpc          # what follows -- goes to both servers
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx

from benchmarks.engines.machine import commit, processor
from benchmarks.engines.spread import Spread
from benchmarks.handoff_probe import HandoffProbe
from benchmarks.token_gap import running_server

MAX_FIRST_TOKEN_RATIO = 1.05
MIN_ROUNDS = 3
_NUM_TOKENS = 9
"""Of an answer: the first two, and the gaps after them as decode steps."""
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Medians over the requests of one round to one server, in seconds. ``step_s`` is a gap between later tokens, ``exposed_s``
    the mean of the metric, 0 where nothing is handed off."""

    first_token_s: float
    first_gap_s: float
    step_s: float
    exposed_s: float

    @property
    def gap_ratio(self) -> float:
        """Of the first gap to what the target allows it."""
        return self.first_gap_s / (self.step_s + self.exposed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of one prompt length."""

    pair: Turn
    colocated: Turn

    @property
    def first_token_ratio(self) -> float:
        return self.pair.first_token_s / self.colocated.first_token_s


Rounds = dict[int, list[Round]]
"""By the prompt's tokens."""


async def measure(pair_url: str, colocated_url: str, flags: argparse.Namespace) -> Rounds:
    """Every length in every round. Requests to the two servers alternate, and so does which of them is asked first."""
    rounds: Rounds = {}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as http:
        pair = HandoffProbe(pair_url, http, flags.seed)
        colocated = HandoffProbe(colocated_url, http, flags.seed)  # with the same prompts
        at_start = await pair.totals()
        for probe in (pair, colocated):
            for num_prompt_tokens in flags.prompts:
                await probe.token_times(num_prompt_tokens, _NUM_TOKENS)  # warms up, and does not count
        await pair.totals_after(at_start, len(flags.prompts))
        for number in range(flags.rounds):
            for num_prompt_tokens in flags.prompts:
                one = await _measure_round(pair, colocated, num_prompt_tokens, flags.requests)
                rounds.setdefault(num_prompt_tokens, []).append(one)
                _say(f"round {number + 1}, {num_prompt_tokens} tokens: first token {one.first_token_ratio:.3f}x")
    return rounds


async def _measure_round(pair: HandoffProbe, colocated: HandoffProbe, num_prompt_tokens: int, num_requests: int) -> Round:
    times: dict[HandoffProbe, list[list[float]]] = {pair: [], colocated: []}
    before = await pair.totals()
    for number in range(num_requests):
        for probe in (pair, colocated) if number % 2 == 0 else (colocated, pair):
            times[probe].append(await probe.token_times(num_prompt_tokens, _NUM_TOKENS))
    handoffs = await pair.totals_after(before, num_requests)
    if handoffs.num_acknowledged != num_requests:
        raise RuntimeError(f"{num_requests} prompts were handed off {handoffs.num_acknowledged} times")
    return Round(
        pair=turn_of(times[pair], handoffs.exposed_s / num_requests),
        colocated=turn_of(times[colocated], 0.0),
    )


def turn_of(times: Sequence[Sequence[float]], exposed_s: float) -> Turn:
    """Of requests with the times at which their tokens came."""
    later_gaps = [after - before for of_request in times for before, after in pairwise(of_request[1:])]
    return Turn(
        first_token_s=median(of_request[0] for of_request in times),
        first_gap_s=median(of_request[1] - of_request[0] for of_request in times),
        step_s=median(later_gaps),
        exposed_s=exposed_s,
    )


def make_report(rounds: Rounds, *, command: str, num_requests: int) -> str:
    """Markdown, with a line at its end."""
    num_rounds = min(map(len, rounds.values()))
    lines = [
        "# What a hand-off costs a request alone",
        "",
        f"- commit: {commit()}",
        f"- machine: {processor(os.cpu_count() or 1)}",
        f"- command: `{command}`",
        f"- {num_requests} requests a round to either server, one at a time, in turn",
    ]
    if num_rounds < MIN_ROUNDS:
        lines.append(f"- a trial: a result takes at least {MIN_ROUNDS} rounds, and this has {num_rounds}")
    lines += [
        "",
        f"Median (lowest-highest) of {num_rounds} rounds, each the median of its requests; milliseconds. Ratios are taken",
        "within a round; a mark says whether their median meets the target.",
        "",
        "## First token",
        "",
        f"| prompt | pair | both phases in one worker | ratio, target {MAX_FIRST_TOKEN_RATIO:g} |",
        "|---|---|---|---|",
    ]
    for num_prompt_tokens, each in rounds.items():
        ratio = _spread(each, lambda one: one.first_token_ratio)
        cells = [
            _milliseconds(each, lambda one: one.pair.first_token_s),
            _milliseconds(each, lambda one: one.colocated.first_token_s),
            f"{ratio.text(3)} {_mark(ratio.median <= MAX_FIRST_TOKEN_RATIO)}",
        ]
        lines.append(f"| {num_prompt_tokens} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Gap from the first token to the second, of the pair",
        "",
        "| prompt | gap | decode step | exposed transfer | gap / (step + exposed), target 1 | the same gap in one worker |",
        "|---|---|---|---|---|---|",
    ]
    for num_prompt_tokens, each in rounds.items():
        ratio = _spread(each, lambda one: one.pair.gap_ratio)
        cells = [
            _milliseconds(each, lambda one: one.pair.first_gap_s),
            _milliseconds(each, lambda one: one.pair.step_s),
            _milliseconds(each, lambda one: one.pair.exposed_s),
            f"{ratio.text(2)} {_mark(ratio.median <= 1)}",
            _milliseconds(each, lambda one: one.colocated.first_gap_s),
        ]
        lines.append(f"| {num_prompt_tokens} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(rounds: Sequence[Round], measure_of: Callable[[Round], float]) -> Spread:
    spread = Spread.of(map(measure_of, rounds))
    assert spread is not None
    return spread


def _milliseconds(rounds: Sequence[Round], seconds_of: Callable[[Round], float]) -> str:
    return _spread(rounds, lambda one: 1e3 * seconds_of(one)).text(1)


def _mark(is_met: bool) -> str:
    return "✓" if is_met else "✗"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to first token and first gap of the pair beside one worker.")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of every length (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=10, metavar="N", help="to either server a round (default: %(default)s)")
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="+",
        default=[128, 512, 2048],
        metavar="N",
        help="tokens of a prompt (default: 128 512 2048)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER", help="where to write"
    )
    parser.add_argument("serve_args", nargs="*", help="flags for both servers, after --")
    flags = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.handoff_cost", *sys.argv[1:]])
    with running_server(flags.serve_args) as pair_url, running_server([*flags.serve_args, "--colocated"]) as colocated_url:
        # the client belongs on the cores that the servers share, not on decode's: see twinpool/core_plan.py
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        rounds = asyncio.run(measure(pair_url, colocated_url, flags))
    report = make_report(rounds, command=command, num_requests=flags.requests)
    (flags.results / "handoff_cost.md").write_text(report)
    print(report)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
