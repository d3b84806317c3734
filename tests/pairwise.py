"""Covering arrays: few rows in which any two values of any two factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with a value of each factor, chosen greedily: each takes in as many pairs that are still missing as any row can."""
    open_pairs = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(factors)), 2)
        for a, b in itertools.product(range(len(factors[i])), range(len(factors[j])))
    }
    candidates = list(itertools.product(*(range(len(factor)) for factor in factors)))
    rows = []
    while open_pairs:
        best = max(candidates, key=lambda row: len(_pairs_of(row) & open_pairs))
        open_pairs -= _pairs_of(best)
        rows.append(tuple(factor[index] for factor, index in zip(factors, best, strict=True)))
    return rows


def _pairs_of(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}
