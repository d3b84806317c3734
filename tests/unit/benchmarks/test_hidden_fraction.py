from pathlib import Path

import pytest

from benchmarks.hidden_fraction import Turn, best_hidden_fraction, draw, make_report


def turn(exposed_s: float, link_bytes_per_s: float | None = None) -> Turn:
    return Turn(link_bytes_per_s=link_bytes_per_s, first_token_s=2.0, num_bytes=60_000_000, transfer_s=1.0, exposed_s=exposed_s)


def test_on_a_fast_link_one_chunk_of_the_transfer_always_remains() -> None:
    for speed in (1.0, 2.0, 100.0, None):
        assert best_hidden_fraction(speed, 32) == pytest.approx(31 / 32)
    assert best_hidden_fraction(2.0, 1) == 0.0


def test_on_a_slow_link_what_piles_up_remains_too() -> None:
    # Four chunks, ready at 1, 2, 3 and 4, two units each on the link: the last is there at 9, so 5 of 8 are exposed.
    assert best_hidden_fraction(0.5, 4) == pytest.approx(3 / 8)


def test_report_says_whether_the_target_is_met_and_what_the_link_was() -> None:
    turns = {
        None: [turn(0.01)],
        0.5: [turn(0.6, 15e6)],
        2.0: [turn(0.04, 66e6)],
    }
    report = make_report(turns, command="benchmark", num_prompt_tokens=4096, num_chunk_tokens=128)
    rows = [line for line in report.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| 0.5x | 0.50 (0.50-0.50) | 15.0 (15.0-15.0) | 40.0 (40.0-40.0) % | 48.4% |  | 600.0 (600.0-600.0) | 1.00 (1.00-1.00) "
        "| 2.00 (2.00-2.00) |",
        "| 2x | 2.20 (2.20-2.20) | 66.0 (66.0-66.0) | 96.0 (96.0-96.0) % | 96.9% | 95% ✓ | 40.0 (40.0-40.0) | 1.00 (1.00-1.00) "
        "| 2.00 (2.00-2.00) |",
        "| unlimited | - | - | 99.0 (99.0-99.0) % | 96.9% |  | 10.0 (10.0-10.0) | 1.00 (1.00-1.00) | 2.00 (2.00-2.00) |",
    ]
    assert "- a trial: a result takes at least 3 rounds, and this has 1" in report
    missed = {**turns, 2.0: [turn(0.06, 60e6)]}
    assert "95% ✗" in make_report(missed, command="benchmark", num_prompt_tokens=4096, num_chunk_tokens=128)


def test_more_exposed_than_transferred_is_nothing_hidden() -> None:
    assert turn(1.5).hidden_fraction == 0.0


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    turns = {None: [turn(0.01)], 1.0: [turn(0.1, 30e6)], 2.0: [turn(0.04, 60e6)]}
    draw(turns, tmp_path / "plot.png", num_prompt_tokens=256, num_chunk_tokens=128)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
