import pytest

from benchmarks.handoff_cost import Round, Turn, make_report, turn_of


def test_medians_over_the_requests_of_a_round() -> None:
    times = [[1.0, 1.05, 1.06, 1.08], [2.0, 2.03, 2.05, 2.07], [1.5, 1.54, 1.56, 1.6]]
    turn = turn_of(times, 0.01)
    assert turn.first_token_s == 1.5
    assert turn.first_gap_s == pytest.approx(0.04)
    assert turn.step_s == pytest.approx(0.02)
    assert turn.gap_ratio == pytest.approx(0.04 / 0.03)


def test_report_has_ratios_of_rounds_with_their_targets() -> None:
    colocated = Turn(first_token_s=1.0, first_gap_s=0.02, step_s=0.02, exposed_s=0.0)
    pair = Turn(first_token_s=1.04, first_gap_s=0.03, step_s=0.02, exposed_s=0.015)
    slow = Turn(first_token_s=1.06, first_gap_s=0.05, step_s=0.02, exposed_s=0.02)
    rounds = {
        128: [Round(pair=pair, colocated=colocated)] * 3,
        512: [Round(pair=slow, colocated=colocated)] * 3,
    }
    report = make_report(rounds, command="benchmark", num_requests=10)
    rows = [line for line in report.splitlines() if line.startswith(("| 128", "| 512"))]
    assert rows == [
        "| 128 | 1040.0 (1040.0-1040.0) | 1000.0 (1000.0-1000.0) | 1.040 (1.040-1.040) ✓ |",
        "| 512 | 1060.0 (1060.0-1060.0) | 1000.0 (1000.0-1000.0) | 1.060 (1.060-1.060) ✗ |",
        "| 128 | 30.0 (30.0-30.0) | 20.0 (20.0-20.0) | 15.0 (15.0-15.0) | 0.86 (0.86-0.86) ✓ | 20.0 (20.0-20.0) |",
        "| 512 | 50.0 (50.0-50.0) | 20.0 (20.0-20.0) | 20.0 (20.0-20.0) | 1.25 (1.25-1.25) ✗ | 20.0 (20.0-20.0) |",
    ]
    assert "a trial" not in report
