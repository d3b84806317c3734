from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinpool.core_plan import CorePlan, plan_cores


def plan(num_cores: int, *, prefill: int = 1, decode: int = 1, decode_threads: int | None = None) -> CorePlan:
    return plan_cores(
        range(num_cores),
        num_prefill_workers=prefill,
        num_decode_workers=decode,
        prefill_threads=None,
        decode_threads=decode_threads,
    )


def test_one_core_is_shared_by_all() -> None:
    assert plan(1) == CorePlan(shared=(0,), decode=((),), decode_threads=1, prefill_threads=1)


def test_two_cores_decode_has_one_to_itself() -> None:
    assert plan(2) == CorePlan(shared=(0,), decode=((1,),), decode_threads=1, prefill_threads=1)


def test_more_cores_go_to_prefill_mostly() -> None:
    assert plan(8) == CorePlan(shared=tuple(range(6)), decode=((6, 7),), decode_threads=2, prefill_threads=6)


def test_more_decode_workers_than_cores_pins_nothing() -> None:
    assert plan(2, decode=2) == CorePlan(shared=(0, 1), decode=((), ()), decode_threads=1, prefill_threads=2)


def test_threads_asked_for_are_given_cores() -> None:
    assert plan(4, decode_threads=3).decode == ((1, 2, 3),)
    assert plan(4, decode_threads=4).decode == ((),)


@given(
    cores=st.sets(st.integers(0, 200), min_size=1),
    prefill=st.integers(0, 8),
    decode=st.integers(1, 8),
    decode_threads=st.none() | st.integers(1, 64),
)
def test_cores_are_divided_without_rest_or_overlap(
    cores: set[int], prefill: int, decode: int, decode_threads: int | None
) -> None:
    ordered = sorted(cores)
    plan = plan_cores(
        ordered, num_prefill_workers=prefill, num_decode_workers=decode, prefill_threads=None, decode_threads=decode_threads
    )
    divided = [*plan.shared, *(core for own in plan.decode for core in own)]
    assert sorted(divided) == ordered
    assert plan.shared
    assert len(plan.decode) == decode
    assert len({len(own) for own in plan.decode}) == 1
    assert plan.prefill_threads >= 1
    assert all(len(own) in (0, plan.decode_threads) for own in plan.decode)
