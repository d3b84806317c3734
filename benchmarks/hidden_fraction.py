"""Measures how much of a hand-off's transfer is hidden behind computing, by the speed of the link between the workers.

A whole server runs on the loopback of a network namespace of its own, with pages over gRPC. What goes to the decode worker's
port is held to k times the rate at which pages are produced: the bytes of a prompt's pages over the time to its first token, as
the unlimited link gave it in the same round. Prompts come one at a time, each of random words. Needs root, and `ip` and `tc`.

    .venv/bin/python -m benchmarks.hidden_fraction
    .venv/bin/python -m benchmarks.hidden_fraction --rounds 1 --prompt 512 --speeds 1 2 --results /tmp      # a trial
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import throttled_loopback
from benchmarks.engines.machine import commit, processor
from benchmarks.engines.spread import Spread
from benchmarks.handoff_probe import HandoffProbe
from benchmarks.token_gap import running_server

UNLIMITED = "unlimited"
TARGET_SPEED, TARGET = 2.0, 0.95
MIN_ROUNDS = 3
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt. ``link_bytes_per_s`` is what the link was held to, None where it was not."""

    link_bytes_per_s: float | None
    first_token_s: float
    num_bytes: int
    transfer_s: float
    exposed_s: float

    @property
    def hidden_fraction(self) -> float:
        return max(0.0, 1.0 - self.exposed_s / self.transfer_s)

    @property
    def produced_bytes_per_s(self) -> float:
        return self.num_bytes / self.first_token_s

    @property
    def speed(self) -> float | None:
        """Of the link, in rates of production, as they were in this turn."""
        return None if self.link_bytes_per_s is None else self.link_bytes_per_s / self.produced_bytes_per_s


Turns = dict[float | None, list[Turn]]
"""By the link's speed in rates of production, None for unlimited; one turn a round."""


def best_hidden_fraction(speed: float | None, num_chunks: int) -> float:
    """With chunks that all take equally long, nothing but the link's speed in the way, and a commit that takes no time."""
    if speed is None:
        return 1.0 - 1.0 / num_chunks
    # In times of one chunk: each takes 1 / speed on the link, which is free again by then or not.
    last_sent = num_chunks + 1 / speed if speed >= 1 else 1 + num_chunks / speed
    return 1.0 - (last_sent - num_chunks) / (num_chunks / speed)


async def measure(url: str, flags: argparse.Namespace) -> Turns:
    """All rounds. Each begins with the unlimited link and goes on from another speed than the one before."""
    turns: Turns = {None: [], **{speed: [] for speed in flags.speeds}}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as http:
        probe = HandoffProbe(url, http, flags.seed)
        port = await _decode_port(url, http)
        await _take_turn(probe, port, flags.prompt, None)  # warms up, and does not count
        for number in range(flags.rounds):
            unlimited = await _take_turn(probe, port, flags.prompt, None)
            turns[None].append(unlimited)
            first = number % len(flags.speeds)
            for speed in (*flags.speeds[first:], *flags.speeds[:first]):
                link_bytes_per_s = speed * unlimited.produced_bytes_per_s
                turns[speed].append(await _take_turn(probe, port, flags.prompt, link_bytes_per_s))
                _say(f"round {number + 1}, {speed:g}x: {turns[speed][-1].hidden_fraction:.1%} hidden")
    return turns


async def _take_turn(probe: HandoffProbe, port: int, num_prompt_tokens: int, link_bytes_per_s: float | None) -> Turn:
    throttled_loopback.limit(port, link_bytes_per_s)
    before = await probe.totals()
    first_token_s, *_ = await probe.token_times(num_prompt_tokens, 2)  # the second one takes a commit
    handoff = await probe.totals_after(before, 1)
    if handoff.num_acknowledged != 1:
        raise RuntimeError(f"one prompt was handed off {handoff.num_acknowledged} times")
    return Turn(
        link_bytes_per_s=link_bytes_per_s,
        first_token_s=first_token_s,
        num_bytes=handoff.num_bytes,
        transfer_s=handoff.transfer_s,
        exposed_s=handoff.exposed_s,
    )


async def _decode_port(url: str, http: httpx.AsyncClient) -> int:
    workers = (await http.get(f"{url}/admin/workers")).raise_for_status().json()["workers"]
    (address,) = [worker["address"] for worker in workers if worker["role"] == "decode"]
    return int(address.rpartition(":")[2])


def make_report(turns: Turns, *, command: str, num_prompt_tokens: int, num_chunk_tokens: int) -> str:
    """Markdown, with a line at its end."""
    num_rounds, num_chunks = len(turns[None]), -(-num_prompt_tokens // num_chunk_tokens)
    produced = Spread.of(turn.produced_bytes_per_s / 1e6 for turn in turns[None])
    assert produced is not None
    lines = [
        "# How much of the transfer is hidden",
        "",
        f"- commit: {commit()}",
        f"- machine: {processor(os.cpu_count() or 1)}",
        f"- command: `{command}`",
        f"- prompt of {num_prompt_tokens} tokens in chunks of {num_chunk_tokens}, {turns[None][0].num_bytes / 1e6:.1f} MB of "
        f"pages over gRPC; one prompt at a time; pages produced at {produced.text(1)} MB/s",
    ]
    if num_rounds < MIN_ROUNDS:
        lines.append(f"- a trial: a result takes at least {MIN_ROUNDS} rounds, and this has {num_rounds}")
    lines += [
        "",
        f"Median (lowest-highest) of {num_rounds} rounds. *Hidden* is 1 - exposed / transfer: *exposed* runs from the last",
        "chunk computed to the commit acknowledged, *transfer* is the time in which a segment or the commit was under way.",
        f"*At best* is what {num_chunks} equal chunks allow on such a link: the last one always remains. *Link* is in rates of",
        "production.",
        "",
        "| link | as it was | MB/s | hidden | at best | target | exposed ms | transfer s | first token s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(speed, of_speed, num_chunks) for speed, of_speed in sorted(turns.items(), key=_slow_first)]
    return "\n".join(lines) + "\n"


def _row(speed: float | None, turns: Sequence[Turn], num_chunks: int) -> str:
    hidden = Spread.of(100 * turn.hidden_fraction for turn in turns)
    assert hidden is not None
    target = ""
    if speed == TARGET_SPEED:
        target = f"{TARGET:.0%} {'✓' if hidden.median >= 100 * TARGET else '✗'}"
    cells = [
        UNLIMITED if speed is None else f"{speed:g}x",
        _text(Spread.of(turn.speed for turn in turns), 2),
        _text(Spread.of(turn.link_bytes_per_s and turn.link_bytes_per_s / 1e6 for turn in turns), 1),
        f"{hidden.text(1)} %",
        f"{best_hidden_fraction(speed, num_chunks):.1%}",
        target,
        _text(Spread.of(1e3 * turn.exposed_s for turn in turns), 1),
        _text(Spread.of(turn.transfer_s for turn in turns), 2),
        _text(Spread.of(turn.first_token_s for turn in turns), 2),
    ]
    return f"| {' | '.join(cells)} |"


def _text(spread: Spread | None, digits: int) -> str:
    return "-" if spread is None else spread.text(digits)


def _slow_first(item: tuple[float | None, list[Turn]]) -> float:
    return float("inf") if item[0] is None else item[0]


def draw(turns: Turns, path: Path, *, num_prompt_tokens: int, num_chunk_tokens: int) -> None:
    """Hidden fraction by the link's speed: medians with bars from lowest to highest, beside what is possible at best. Raises
    ImportError without matplotlib."""
    from matplotlib.figure import Figure

    num_chunks = -(-num_prompt_tokens // num_chunk_tokens)
    speeds = sorted(speed for speed in turns if speed is not None)
    picture = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = picture.subplots()
    spreads = [_hidden_percent(turns[speed]) for speed in speeds]
    bars = [[each.median - each.low for each in spreads], [each.high - each.median for each in spreads]]
    axes.errorbar(speeds, [each.median for each in spreads], yerr=bars, marker="o", capsize=3, label="measured")
    grid = [speeds[0] + (speeds[-1] - speeds[0]) * step / 200 for step in range(201)]
    at_best = [100 * best_hidden_fraction(speed, num_chunks) for speed in grid]
    axes.plot(grid, at_best, linestyle="--", color="grey", label=f"at best, {num_chunks} equal chunks")
    axes.axhline(_hidden_percent(turns[None]).median, linestyle=":", color="tab:green", label="measured, link unlimited")
    axes.plot([TARGET_SPEED], [100 * TARGET], marker="_", markersize=18, color="tab:red", linestyle="", label="target")
    axes.set(
        title=f"Prompt of {num_prompt_tokens} tokens, chunks of {num_chunk_tokens}, {commit()}",
        xlabel="speed of the link, in rates at which pages are produced",
        ylabel="hidden, % of the transfer",
        ylim=(0, 101),
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")
    picture.savefig(path, dpi=120)


def _hidden_percent(turns: Sequence[Turn]) -> Spread:
    spread = Spread.of(100 * turn.hidden_fraction for turn in turns)
    assert spread is not None
    return spread


def main() -> None:
    parser = argparse.ArgumentParser(description="Hidden part of a hand-off's transfer by the speed of the link.")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of every speed (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=4096, metavar="N", help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, metavar="N", help="tokens of a chunk (default: %(default)s)")
    parser.add_argument(
        "--speeds",
        type=float,
        nargs="+",
        default=[0.5, 1.0, 1.5, 2.0, 4.0],
        metavar="K",
        help="speeds of the link in rates of production, besides unlimited (default: 0.5 1 1.5 2 4)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER", help="where to write"
    )
    parser.add_argument("serve_args", nargs="*", help="further flags for the server, after --")
    flags = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.hidden_fraction", *sys.argv[1:]])
    throttled_loopback.enter()
    serve_args = ["--transfer", "grpc", "--max-num-batched-tokens", str(flags.chunk), *flags.serve_args]
    with running_server(serve_args) as url:
        # the client belongs on the cores that the server shares, not on decode's: see twinpool/core_plan.py
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        turns = asyncio.run(measure(url, flags))
    report = make_report(turns, command=command, num_prompt_tokens=flags.prompt, num_chunk_tokens=flags.chunk)
    (flags.results / "hidden_fraction.md").write_text(report)
    print(report)
    try:
        picture = flags.results / "hidden_fraction.png"
        draw(turns, picture, num_prompt_tokens=flags.prompt, num_chunk_tokens=flags.chunk)
    except ImportError:
        _say("no plot: pip install 'twinpool[bench]' brings matplotlib")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
