"""What every arm is put through, with an engine that only counts."""

from collections.abc import Sequence

from benchmarks.engines.arm import DecodeRun, measure
from tests.unit.benchmarks.test_workload import WORKLOAD


class _CountingEngine:
    setup = "counts"

    def __init__(self) -> None:
        self.prefills: list[int] = []
        self.decodes: list[tuple[int, int, int]] = []

    def prefill(self, prompt: Sequence[int]) -> float:
        self.prefills.append(len(prompt))
        return float(len(self.prefills))

    def decode(self, prompt: Sequence[int], *, batch: int, num_steps: int) -> DecodeRun:
        self.decodes.append((len(prompt), batch, num_steps))
        return DecodeRun(step_s=tuple(float(step) for step in range(num_steps)), token_ids=tuple(range(num_steps + 1)))


def test_the_whole_workload() -> None:
    engine = _CountingEngine()
    figures = measure(engine, WORKLOAD)

    # 1. prompts: each once for the warm-up, then as often as it counts
    assert engine.prefills == [128] * 5 + [512] * 5
    assert figures.prefill[0].seconds == (2.0, 3.0, 4.0, 5.0)

    # 2. decode: first the tokens to compare, then batches, then contexts, each with three steps of warm-up before its context
    assert engine.decodes == [(256, 1, 31), (253, 1, 67), (253, 32, 67), (253, 8, 19), (4093, 8, 19)]
    assert figures.decode[1].size == 32
    assert figures.decode[1].seconds == tuple(float(step) for step in range(3, 67))
    assert [timing.size for timing in figures.steps] == [256, 4096]
    assert len(figures.token_ids) == 32

    assert figures.peak_memory_bytes > 0
    assert figures.setup == "counts"
