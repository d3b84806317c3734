from __future__ import annotations

import math

import numpy as np
import pytest

from serving_core.errors import ModelFileError
from serving_core.model_numbers import MAX_COUNT, MAX_NUMBER, MIN_NUMBER, checked_count, checked_number


@pytest.mark.parametrize("value", [1, 7, MAX_COUNT])
def test_a_count_is_what_was_stated(value: int) -> None:
    assert checked_count(value, ModelFileError) == value
    assert checked_count(0, ModelFileError, smallest=0) == 0


@pytest.mark.parametrize("value", [0, MAX_COUNT + 1, 10**400, 2.0, True, "2", None])
def test_no_count(value: object) -> None:
    with pytest.raises(ModelFileError, match="a whole number from 1 to 1073741824"):
        checked_count(value, ModelFileError)


@pytest.mark.parametrize("value", [MIN_NUMBER, 1e-6, 3, 1e6, MAX_NUMBER])
def test_a_number_is_what_was_stated(value: float) -> None:
    assert checked_number(value, ModelFileError) == value


@pytest.mark.parametrize("value", [0, -1.0, 1e-19, 1e19, 10**400, math.inf, math.nan, True, "2", None])
def test_no_number(value: object) -> None:
    with pytest.raises(ModelFileError, match=r"a number from 1e-18 to 1e\+18"):
        checked_number(value, ModelFileError)
    with pytest.raises(ModelFileError, match="a number from 2 to"):
        checked_number(1.5, ModelFileError, smallest=2.0)


def test_two_numbers_multiply_and_divide_in_float32() -> None:
    ends = np.array([MIN_NUMBER, MAX_NUMBER], np.float32)
    for results in (np.outer(ends, ends), np.divide.outer(ends, ends)):
        assert results.dtype == np.float32
        assert np.all(np.isfinite(results) & (results >= np.finfo(np.float32).tiny))
