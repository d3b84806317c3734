"""Which counts and numbers of a model file can be computed with, whatever its format."""

from __future__ import annotations

from collections.abc import Callable

from serving_core.errors import ModelFileError

MAX_COUNT = 2**30
"""Of anything that a model file counts. Sums and products of two still fit 64 bits."""

MIN_NUMBER, MAX_NUMBER = 1e-18, 1e18
"""The product and the quotient of two such numbers are still float32 numbers, neither 0 nor infinite."""


def checked_count(value: object, wrong: Callable[[str], ModelFileError], *, smallest: int = 1) -> int:
    """A whole number from ``smallest`` to ``MAX_COUNT``. ``wrong`` makes the error for a value that is not what it is given."""
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= MAX_COUNT:
        raise wrong(f"a whole number from {smallest} to {MAX_COUNT}")
    return value


def checked_number(value: object, wrong: Callable[[str], ModelFileError], *, smallest: float = MIN_NUMBER) -> float:
    """A number from ``smallest`` to ``MAX_NUMBER``; ``wrong`` as for ``checked_count``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not smallest <= value <= MAX_NUMBER:
        raise wrong(f"a number from {smallest:g} to {MAX_NUMBER:g}")
    return float(value)
