"""How long a way that failed is left alone."""

from __future__ import annotations

from kv_transfer.hold_off import MAX_RECEIVERS, HoldOff
from serving_core.clock import ManualClock
from serving_core.ids import Incarnation

ADDRESS, FIRST, SECOND = "127.0.0.1:1", Incarnation("first"), Incarnation("second")


def test_it_doubles_with_each_failure_up_to_its_bound_and_ends_with_a_success() -> None:
    clock = ManualClock()
    hold_off = HoldOff(clock, first_s=1.0, max_s=3.0)
    assert hold_off.remaining_s(ADDRESS, FIRST) == 0
    for expected_s in (1.0, 2.0, 3.0, 3.0):
        hold_off.fail(ADDRESS, FIRST)
        assert hold_off.remaining_s(ADDRESS, FIRST) == expected_s
        clock.advance(expected_s)
        assert hold_off.remaining_s(ADDRESS, FIRST) == 0
    hold_off.succeed(ADDRESS, FIRST)
    hold_off.fail(ADDRESS, FIRST)
    assert hold_off.remaining_s(ADDRESS, FIRST) == 1.0


def test_a_receiver_that_came_back_is_another_one() -> None:
    hold_off = HoldOff(ManualClock())
    hold_off.fail(ADDRESS, FIRST)
    assert hold_off.remaining_s(ADDRESS, SECOND) == 0
    assert hold_off.remaining_s("127.0.0.1:2", FIRST) == 0


def test_without_a_first_delay_there_is_none() -> None:
    hold_off = HoldOff(ManualClock(), first_s=0.0)
    for _ in range(3):
        hold_off.fail(ADDRESS, FIRST)
        assert hold_off.remaining_s(ADDRESS, FIRST) == 0


def test_the_longest_held_is_forgotten_when_there_are_too_many() -> None:
    hold_off = HoldOff(ManualClock())
    hold_off.fail(ADDRESS, FIRST)
    for number in range(MAX_RECEIVERS):
        hold_off.fail(f"127.0.0.1:{number}", SECOND)
    assert hold_off.remaining_s(ADDRESS, FIRST) == 0
    assert hold_off.remaining_s("127.0.0.1:0", SECOND) > 0
