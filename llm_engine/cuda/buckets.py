"""The numbers of rows that a decode step on CUDA is padded to. The number alone decides, whether the step is captured or not:
matrix products round differently with the number of their rows."""

from __future__ import annotations

from collections.abc import Iterator

from llm_engine.padding import padded

MAX_GRAPH_ROWS = 256
"""A step of more rows keeps the device busy for longer than it takes to launch."""


def bucket_of(num_rows: int) -> int:
    """The smallest bucket that holds ``num_rows``, at least 1."""
    assert num_rows >= 1
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    return padded(num_rows, 8 if num_rows <= 64 else 16 if num_rows <= 256 else 64)


def buckets_up_to(num_rows: int) -> Iterator[int]:
    """Every bucket that steps of 1 to ``num_rows`` rows fall into, in rising order."""
    bucket = 0
    while bucket < num_rows:
        bucket = bucket_of(bucket + 1)
        yield bucket
