from pathlib import Path

import pytest

from benchmarks.engines.figures import Figures, Timing

FIGURES = Figures(
    prefill=(Timing(size=100, seconds=(0.5, 0.1, 0.2)),),
    decode=(Timing(size=4, seconds=(0.1, 0.1, 0.2)),),
    steps=(Timing(size=256, seconds=(0.3, 0.1, 0.2)),),
    token_ids=(1, 2),
    peak_memory_bytes=3,
    setup="of a test",
)


def test_written_and_read(tmp_path: Path) -> None:
    FIGURES.write(tmp_path / "figures.json")
    assert Figures.read(tmp_path / "figures.json") == FIGURES


def test_prefill_is_the_median_run_and_decode_all_steps_together() -> None:
    assert FIGURES.prefill_tokens_per_s(100) == pytest.approx(500)
    assert FIGURES.decode_tokens_per_s(4) == pytest.approx(30)
    assert FIGURES.step_s(256) == 0.2


def test_what_was_not_measured() -> None:
    assert FIGURES.prefill_tokens_per_s(4) is None
    assert FIGURES.decode_tokens_per_s(100) is None
    assert FIGURES.step_s(100) is None
