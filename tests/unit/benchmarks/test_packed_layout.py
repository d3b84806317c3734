from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engines.spread import Spread
from benchmarks.packed_layout import Comparison, compare, make_report
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import load_model
from serving_core.kv_page_layout import KVDType
from tests.tiny_model import write_tiny_gguf
from tests.unit.llm_engine.tiny_engine import skip_without_kernels


def comparison(low: float, middle: float, high: float) -> Comparison:
    step = Spread(median=2.0, low=1.0, high=3.0)
    return Comparison(batch=1, context=16, paged_ms=step, packed_ms=step, saved=Spread(median=middle, low=low, high=high))


@pytest.mark.parametrize(
    ("saved", "verdict"),
    [
        ((0.01, 0.04, 0.09), "packed"),
        ((-0.01, 0.04, 0.09), "equal"),
        ((0.01, 0.02, 0.09), "equal"),
        ((-0.09, -0.04, -0.01), "paged"),
        ((-0.09, -0.04, 0.01), "equal"),
    ],
)
def test_a_side_wins_clearly_or_not_at_all(saved: tuple[float, float, float], verdict: str) -> None:
    row = comparison(*saved)
    assert row.verdict == verdict
    report = make_report([row], command="command", machine="machine", setup="setup", num_rounds=5)
    assert f"| {verdict} |" in report
    assert ("Packed wins at 1 x 16." in report) == (verdict == "packed")


def test_both_layouts_are_measured(tmp_path: Path) -> None:
    skip_without_kernels()
    loaded = load_model(write_tiny_gguf(tmp_path / "tiny.gguf"), dtype=KVDType.BFLOAT16)
    paged_cache = KVCache(loaded.config.page_layout(page_size=16, dtype=KVDType.BFLOAT16), 8)
    row = compare(loaded, paged_cache, batch=2, context=40, num_rounds=2, num_steps=3)
    assert row.paged_ms.low > 0.0
    assert row.packed_ms.low > 0.0
    assert row.saved.low <= row.saved.median <= row.saved.high < 1.0
