"""The buckets of decode steps."""

from __future__ import annotations

import pytest

from llm_engine.cuda.buckets import bucket_of, buckets_up_to


@pytest.mark.parametrize(
    ("num_rows", "bucket"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (17, 24), (64, 64), (65, 80), (256, 256), (257, 320)],
)
def test_a_step_takes_the_smallest_bucket_that_holds_it(num_rows: int, bucket: int) -> None:
    assert bucket_of(num_rows) == bucket


@pytest.mark.parametrize("max_rows", [1, 2, 3, 64, 65, 250, 1000])
def test_every_step_up_to_the_limit_has_its_bucket(max_rows: int) -> None:
    buckets = list(buckets_up_to(max_rows))
    assert buckets == sorted({bucket_of(num_rows) for num_rows in range(1, max_rows + 1)})


def test_padding_is_at_most_a_quarter_of_a_large_step() -> None:
    assert max(bucket_of(num_rows) / num_rows for num_rows in range(40, 2000)) <= 1.25
