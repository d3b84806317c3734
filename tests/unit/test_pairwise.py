"""Covering arrays cover, in few rows."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import missing_pairs, pairwise

FACTORS = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(
    lambda sizes: [[f"{place}-{value}" for value in range(size)] for place, size in enumerate(sizes)]
)


@given(FACTORS)
def test_any_two_values_meet_in_rows_of_one_value_a_factor(factors: list[list[str]]) -> None:
    rows = pairwise(*factors)
    assert all(len(row) == len(factors) for row in rows)
    assert all(value in factor for row in rows for value, factor in zip(row, factors, strict=True))
    assert missing_pairs(rows, *factors) == set()


@given(FACTORS)
def test_no_row_is_for_nothing(factors: list[list[str]]) -> None:
    rows = pairwise(*factors)
    largest, second = sorted(map(len, factors), reverse=True)[:2]
    assert largest * second <= len(rows) <= math.prod(map(len, factors))
    assert len(set(rows)) == len(rows)


def test_rows_are_few() -> None:
    assert len(pairwise(*[range(3)] * 4)) <= 12  # of 81; 9 is the least
    assert len(pairwise(range(13), range(5), range(3), range(3), range(2))) <= 70  # of 1,170; 65 is the least


def test_what_does_not_meet_is_missing() -> None:
    rows = [("a", 1, "x"), ("a", 2, "y"), ("b", 1, "y")]
    assert missing_pairs(rows, "ab", (1, 2), "xy") == {("b", 2), ("b", "x"), (2, "x")}
