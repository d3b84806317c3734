"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DESCRIPTION = """\
Measures our engine beside llama.cpp, vLLM-CPU and transformers on the same weights, cores and number of threads: decode by
batch, prefill by length, step time by context, memory. Arms take turns; each turn is a process of its own. See
docs/benchmarks.md.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the command line says. A peer's python is None when it is to be left out."""

    model: str
    threads: int
    rounds: int
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    context: int
    steps: int
    context_steps: int
    llama_cpp_python: Path | None
    vllm_python: Path | None
    has_transformers: bool
    arm_timeout: float
    results: Path


def parse_flags(words: Sequence[str]) -> Flags:
    """Ends the process with a sentence and status 2 for what is wrong."""
    num_cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines",
        description=_DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a packaged model or a GGUF file of the Llama family")
    parser.add_argument("--threads", type=_positive, default=num_cores, help="of every arm, each pinned to a core")
    parser.add_argument("--rounds", type=_positive, default=3, help="turns of every arm; fewer than three are a trial")
    parser.add_argument("--batches", type=_sizes, default="1,4,8,16,32", help="decode throughput: sequences at once")
    parser.add_argument("--context", type=_positive, default=256, help="decode throughput: tokens before the first step")
    parser.add_argument("--steps", type=_positive, default=64, help="decode throughput: steps of each batch")
    parser.add_argument("--lengths", type=_sizes, default="128,256,512,1024,2048,4096", help="prefill: tokens of a prompt")
    parser.add_argument("--contexts", type=_sizes, default="256,512,1024,2048,4096", help="step time: tokens before the steps")
    parser.add_argument("--context-steps", type=_positive, default=16, help="step time: steps at each context")
    parser.add_argument("--llama-cpp-python", type=_interpreter, metavar="PYTHON", help="one that has llama-cpp-python")
    parser.add_argument("--vllm-python", type=_interpreter, metavar="PYTHON", help="one that has vllm-cpu")
    parser.add_argument(
        "--transformers", action=argparse.BooleanOptionalAction, default=True, dest="has_transformers", help="the one beside us"
    )
    parser.add_argument("--arm-timeout", type=float, default=1800.0, metavar="SECONDS", help="for one turn of one arm")
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), help="folder for engines.md, .json and .png"
    )
    flags = Flags(**vars(parser.parse_args(words)))
    if flags.threads > num_cores:
        parser.error(f"--threads is {flags.threads}, but this process may use {num_cores} cores")
    return flags


def _positive(word: str) -> int:
    if not word.isascii() or not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 1 on")
    return int(word)


def _sizes(words: str) -> tuple[int, ...]:
    """Ascending, each once; empty for an empty word."""
    return tuple(sorted({_positive(word.strip()) for word in words.split(",")})) if words else ()


def _interpreter(word: str) -> Path:
    path = Path(word).absolute()  # not resolved: an environment's interpreter is a link, and known by where it lies
    if not os.access(path, os.X_OK) or path.is_dir():
        raise argparse.ArgumentTypeError(f"{word} is not a program")
    return path
