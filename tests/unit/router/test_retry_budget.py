"""How often, and how long until then."""

from __future__ import annotations

import random

import pytest

from router.retry_budget import RetryBudget, RetryPolicy

POLICY = RetryPolicy(max_attempts=6, first_pause_s=0.1, max_pause_s=0.5)


def test_pauses_double_up_to_the_cap_and_then_it_is_over() -> None:
    budget = RetryBudget(POLICY, draw=lambda: 1.0)
    assert [budget.spend() for _ in range(6)] == [0.1, 0.2, 0.4, 0.5, 0.5, None]


def test_half_of_a_pause_is_left_to_chance() -> None:
    budget = RetryBudget(POLICY, draw=lambda: 0.0)
    assert budget.spend() == 0.05
    draw = random.Random(1).random
    pauses = [RetryBudget(POLICY, draw).spend() or 0.0 for _ in range(100)]
    assert 0.05 <= min(pauses) < 0.055
    assert 0.095 < max(pauses) <= 0.1


def test_a_new_token_restores_it() -> None:
    budget = RetryBudget(POLICY, draw=lambda: 1.0)
    for _ in range(3):
        assert [budget.spend() for _ in range(5)][-1] is not None
        budget.restore()
    assert budget.num_failures == 0
    assert budget.spend() == pytest.approx(0.1)
