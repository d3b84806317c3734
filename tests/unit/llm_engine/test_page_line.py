from __future__ import annotations

from llm_engine.page_line import PageLine
from serving_core.worker_status import PhaseName

PREFILL, DECODE = PhaseName.PREFILL, PhaseName.DECODE


def test_whoever_came_later_leaves_the_pages_of_who_came_first() -> None:
    line = PageLine()
    assert line.num_kept_from(DECODE, 5.0) == 0
    line.wait(PREFILL, 3, 2.0)
    assert line.num_kept_from(DECODE, 5.0) == 3
    assert line.num_kept_from(DECODE, 2.0) == 0
    assert line.num_kept_from(DECODE, 1.0) == 0


def test_nobody_leaves_pages_to_its_own_phase() -> None:
    line = PageLine()
    line.wait(PREFILL, 3, 2.0)
    assert line.num_kept_from(PREFILL, 5.0) == 0


def test_a_phase_says_anew_who_is_first() -> None:
    line = PageLine()
    line.wait(PREFILL, 3, 2.0)
    line.wait(PREFILL, 1, 4.0)
    assert line.num_kept_from(DECODE, 3.0) == 0
    assert line.num_kept_from(DECODE, 5.0) == 1
    line.leave(PREFILL)
    line.leave(PREFILL)
    assert line.num_kept_from(DECODE, 5.0) == 0
