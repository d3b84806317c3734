"""The command: builds a random model on a device, checks what it computes, measures how fast, prints both."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu_check.checks import CheckResult, Outcome, run_checks
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.speed import Sizes, measure_decode, measure_limits, measure_prefill
from benchmarks.gpu_check.subject import LLAMA_3_8B, TINY, Subject
from llm_engine.device import CPU

_FULL = Sizes(
    decode_batches=(1, 8, 32, 128),
    context=1024,
    num_steps=32,
    prefill_lengths=(512, 2048, 8192),
    copy_bytes=2**32,
    gemm_rows=8192,
)
_SMALL = Sizes(decode_batches=(1, 2, 4), context=24, num_steps=2, prefill_lengths=(16, 64), copy_bytes=2**20, gemm_rows=64)
_FULL_CHECK_LENGTHS = (5, 300, 700, 1100, 1, 513, 256, 900)
_SMALL_CHECK_LENGTHS = (5, 20, 33, 1)


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 when a check failed, 2 when there is no such device."""
    flags = _parse(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device(flags.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device; --tiny --device cpu runs the same checks on the CPU")
        return 2
    config, sizes, lengths = (TINY, _SMALL, _SMALL_CHECK_LENGTHS) if flags.tiny else (LLAMA_3_8B, _FULL, _FULL_CHECK_LENGTHS)
    with torch.inference_mode():
        subject = Subject.random(config, device)
        results = run_checks(subject, lengths)
        limits = measure_limits(device, sizes)
        report = Report(
            device="CPU" if device == CPU else torch.cuda.get_device_name(device),
            torch_version=torch.__version__,
            model="tiny" if flags.tiny else "random, shaped like Llama 3 8B, bfloat16",
            attention="torch" if subject.kernel is None else subject.kernel.name,
            page_size=subject.page_size,
            context=sizes.context,
            checks=tuple(results),
            limits=limits,
            decode=measure_decode(subject, sizes, limits),
            prefill=tuple(measure_prefill(subject, sizes, limits)),
        )
    print(report.table())
    if flags.json is not None:
        flags.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return int(_has_failed(results))


def _has_failed(results: Sequence[CheckResult]) -> bool:
    return any(result.outcome is Outcome.FAILED for result in results)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Checks and measures the engine on a CUDA device, with random weights and without a server.",
    )
    parser.add_argument("--device", default="cuda:0", help="where to compute (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights and short runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is printed to FILE, too")
    return parser.parse_args(words)
