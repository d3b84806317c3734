from benchmarks.engines.spread import Spread


def test_median_with_lowest_and_highest() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)


def test_what_was_not_measured_does_not_count() -> None:
    assert Spread.of([None, 4.0]) == Spread(median=4.0, low=4.0, high=4.0)
    assert Spread.of([None]) is None


def test_text() -> None:
    spread = Spread(median=12.54, low=11.0, high=13.06)
    assert spread.text(1) == "12.5 (11.0-13.1)"
    assert spread.text() == "13 (11-13)"
