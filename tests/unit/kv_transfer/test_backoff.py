"""Delays double up to the cap and start over after progress."""

from __future__ import annotations

from kv_transfer.backoff import Backoff


def test_delays() -> None:
    backoff = Backoff(first_s=0.5, max_s=3.0)
    assert [backoff.next_delay_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert [backoff.next_delay_s() for _ in range(2)] == [0.5, 1.0]
