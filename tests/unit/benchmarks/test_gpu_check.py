"""The check of a GPU, on a tiny model and the CPU: the same code, so that it does not rot where no GPU is."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check.checks import CheckResult, Outcome, run_checks
from benchmarks.gpu_check.command import main
from benchmarks.gpu_check.subject import TINY, Subject
from llm_engine.cuda.paged_places import PagedPlaces
from llm_engine.cuda.plain_paged_kernel import PlainPagedKernel
from llm_engine.device import CPU
from serving_core.errors import ConfigError

ROOT = Path(__file__).parents[3]
LENGTHS = (5, 20, 33, 1)

_IMPORTS = """
import sys
sys.argv = ["gpu_check", "--tiny", "--device", "cpu", "--json", sys.argv[1]]
try:
    import runpy
    runpy.run_path("scripts/gpu_check", run_name="__main__")
except SystemExit as end:
    assert end.code == 0, end.code
foreign = {"ray", "grpc", "transformers", "gguf", "safetensors", "tokenizers", "fastapi", "pydantic"} & sys.modules.keys()
assert not foreign, foreign
"""


def test_it_runs_with_little_more_than_torch_and_writes_what_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, "-c", _IMPORTS, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(path.read_text())
    assert {check["outcome"] for check in report["checks"]} == {"passed"}
    decode = report["decode"]
    for speeds in (decode["computed"], decode["sampled"], decode["ahead"]):
        assert [speed["size"] for speed in speeds] == [1, 2, 4]
        assert all(speed["tokens_per_s"] > 0 and speed["share"] > 0 for speed in speeds)
    assert [speed["size"] for speed in report["prefill"]] == [16, 64]
    assert all(speed["tokens_per_s"] > 0 and speed["share"] > 0 for speed in report["prefill"])
    for line in (
        f"| decode, {report['context']} keys each | batch 4 |",
        f"| decode and sample, steps ahead, {report['context']} keys each | batch 4 |",
        "| prefill | 64 tokens |",
        "| graphs on = graphs off | passed",
    ):
        assert line in run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().out


class LateKernel(PlainPagedKernel):
    """Does not see the newest key."""

    def __call__(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        places: PagedPlaces,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        value_pages = value_pages.clone()
        value_pages[places.pages, places.slots] = 0
        return super().__call__(query, key_pages, value_pages, places, scale=scale, sliding_window=sliding_window)


class LeaningKernel(PlainPagedKernel):
    """A row leans on its neighbour."""

    def __call__(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        places: PagedPlaces,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        own = super().__call__(query, key_pages, value_pages, places, scale=scale, sliding_window=sliding_window)
        return own + own.roll(1, 0) * 0.01


@torch.inference_mode()
def outcomes(kernel: PlainPagedKernel | None) -> dict[str, Outcome]:
    subject = Subject.random(TINY, CPU)
    subject = Subject(config=TINY, decoder=subject.decoder, kernel=kernel, weight_bytes=subject.weight_bytes)
    results: list[CheckResult] = run_checks(subject, LENGTHS)
    return {result.name: result.outcome for result in results}


def test_a_kernel_that_computes_something_else_is_found_out() -> None:
    assert outcomes(LateKernel())["logits and greedy tokens against torch"] is Outcome.FAILED


def test_a_kernel_that_mixes_rows_is_found_out() -> None:
    assert outcomes(LeaningKernel())["rows in another order"] is Outcome.FAILED


def test_it_computes_as_workers_do() -> None:
    kernel = PlainPagedKernel()
    kernel.page_size_multiple = 256
    subject = dataclasses.replace(Subject.random(TINY, CPU), kernel=kernel)
    cache = subject.new_cache(20, 1)
    for make in (subject.prefill, lambda cache: subject.decode(cache, max_graph_rows=1)):
        with pytest.raises(ConfigError, match="--block-size is 16, but plain reads pages of a multiple of 256 tokens"):
            make(cache)
    assert subject.by_torch(cache)


def test_without_a_kernel_what_needs_one_is_skipped() -> None:
    found = outcomes(None)
    assert found["logits and greedy tokens against torch"] is found["graphs on = graphs off"] is Outcome.SKIPPED
    assert found["rows in another order"] is Outcome.PASSED
