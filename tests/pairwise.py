"""Covering arrays: few rows in which any two values of any two factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with a value of each factor, chosen greedily: each takes in as many pairs that are still missing as any row can."""
    open_pairs = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(factors)), 2)
        for a, b in itertools.product(range(len(factors[i])), range(len(factors[j])))
    }
    candidates = {row: _pairs_of(row) for row in itertools.product(*(range(len(factor)) for factor in factors))}
    rows = []
    while open_pairs:
        best = max(candidates, key=lambda row: len(candidates[row] & open_pairs))
        open_pairs -= candidates[best]
        rows.append(tuple(factor[index] for factor, index in zip(factors, best, strict=True)))
    return rows


def missing_pairs(rows: Collection[Sequence[Any]], *factors: Sequence[Any]) -> set[tuple[Any, Any]]:
    """Two values of two factors that meet in none of ``rows``; all of them hashable."""
    return {
        pair
        for i, j in itertools.combinations(range(len(factors)), 2)
        for pair in set(itertools.product(factors[i], factors[j])) - {(row[i], row[j]) for row in rows}
    }


def _pairs_of(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}
