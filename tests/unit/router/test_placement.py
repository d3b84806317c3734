"""Placement as a table: which workers, which path, which reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.generation import Path
from router.placement import NotNow, Placement, Reason, WorkerLoad, place, place_again
from serving_core.ids import WorkerId
from serving_core.page_demand import PageDemand
from serving_core.worker_status import PhaseName

PREFILL, DECODE = PhaseName.PREFILL, PhaseName.DECODE


def make_load(
    worker_id: str,
    *phases: PhaseName,
    can_take_work: bool = True,
    num_free_pages: int = 10,
    num_running: int = 0,
    num_queued_prefill_tokens: int = 0,
) -> WorkerLoad:
    return WorkerLoad(
        worker_id=WorkerId(worker_id),
        phases=frozenset(phases),
        can_take_work=can_take_work,
        page_size=16,
        num_free_pages=num_free_pages,
        num_running=num_running,
        max_num_seqs=4,
        num_queued_prefill_tokens=num_queued_prefill_tokens,
        max_prefill_tokens_per_step=512,
    )


P0, P1 = make_load("prefill-0", PREFILL), make_load("prefill-1", PREFILL)
D0, D1 = make_load("decode-0", DECODE), make_load("decode-1", DECODE)
BOTH = make_load("both-0", PREFILL, DECODE)


def tokens(num_tokens: int) -> PageDemand:
    """A sequence of that length which will not grow."""
    return PageDemand(num_tokens=num_tokens, max_num_tokens=num_tokens)


def chosen(placement: Placement | NotNow) -> tuple[str, str]:
    assert isinstance(placement, Placement)
    return placement.decode, placement.prefill


def test_pair() -> None:
    placement = place([P0, D0], demand=tokens(160))
    assert placement == Placement(
        decode=WorkerId("decode-0"), prefill=WorkerId("prefill-0"), path=Path.PAIR, reason=Reason.TWO_POOLS
    )


def test_local_path_when_the_decode_worker_prefills_too() -> None:
    placement = place([BOTH], demand=tokens(1))
    assert placement == Placement(
        decode=WorkerId("both-0"), prefill=WorkerId("both-0"), path=Path.LOCAL, reason=Reason.COLOCATED
    )


def test_fewest_running_then_most_free_pages() -> None:
    assert chosen(place([P0, replace(D0, num_running=1), D1], demand=tokens(1)))[0] == "decode-1"
    assert chosen(place([P0, D0, replace(D1, num_free_pages=11)], demand=tokens(1)))[0] == "decode-1"


def test_shortest_prefill_queue() -> None:
    assert chosen(place([replace(P0, num_queued_prefill_tokens=1), P1, D0], demand=tokens(1)))[1] == "prefill-1"


@pytest.mark.parametrize(
    ("loads", "why"),
    [
        ([], NotNow.NO_DECODE_WORKER),
        ([P0], NotNow.NO_DECODE_WORKER),
        ([D0], NotNow.NO_PREFILL_WORKER),
        ([P0, replace(D0, can_take_work=False)], NotNow.NO_DECODE_WORKER),
        ([replace(P0, can_take_work=False), D0], NotNow.NO_PREFILL_WORKER),
        ([P0, replace(D0, num_free_pages=0)], NotNow.DECODE_FULL),
        ([P0, replace(D0, num_running=4)], NotNow.DECODE_FULL),
        ([replace(P0, num_queued_prefill_tokens=513), D0], NotNow.PREFILL_BUSY),
        ([replace(BOTH, num_queued_prefill_tokens=513)], NotNow.PREFILL_BUSY),
    ],
)
def test_not_now(loads: list[WorkerLoad], why: NotNow) -> None:
    assert place(loads, demand=tokens(1)) is why


def test_edges_of_the_limits() -> None:
    at_limit = [replace(P0, num_queued_prefill_tokens=512), replace(D0, num_running=3)]
    assert isinstance(place(at_limit, demand=tokens(160)), Placement)
    assert place(at_limit, demand=tokens(161)) is NotNow.DECODE_FULL


def test_a_busy_colocated_worker_gives_way_to_another() -> None:
    other = replace(BOTH, worker_id=WorkerId("both-1"), num_running=2)
    assert chosen(place([replace(BOTH, num_queued_prefill_tokens=513), other], demand=tokens(1))) == ("both-1", "both-1")


def test_workers_to_avoid_are_taken_only_where_there_is_no_other() -> None:
    avoid = frozenset({WorkerId("prefill-0"), WorkerId("decode-0")})
    busier = [P0, replace(P1, num_queued_prefill_tokens=512), D0, replace(D1, num_running=3)]
    assert chosen(place(busier, demand=tokens(1), avoid=avoid)) == ("decode-1", "prefill-1")
    assert chosen(place([P0, D0, replace(D1, num_running=4)], demand=tokens(1), avoid=avoid)) == ("decode-0", "prefill-0")


def test_room_for_a_demand() -> None:
    demand = PageDemand(num_tokens=17, max_num_tokens=160, num_evictions=2)
    assert replace(D0, num_free_pages=6).can_hold(demand)
    assert not replace(D0, num_free_pages=5).can_hold(demand)


def again(loads: list[WorkerLoad], keep_decode: str | None, keep_prefill: str | None, *avoid: str) -> Placement | NotNow:
    return place_again(
        loads,
        demand=tokens(160),
        keep_decode=WorkerId(keep_decode) if keep_decode else None,
        keep_prefill=WorkerId(keep_prefill) if keep_prefill else None,
        avoid=frozenset(map(WorkerId, avoid)),
    )


def test_next_attempt_stays_where_something_is_held() -> None:
    held = replace(D0, num_free_pages=0, num_running=4, can_take_work=False)
    draining = replace(P0, can_take_work=False)
    placement = again([draining, P1, held, D1], "decode-0", "prefill-0")
    assert chosen(placement) == ("decode-0", "prefill-0")
    assert isinstance(placement, Placement)
    assert placement.reason is Reason.RETRY


def test_next_attempt_replaces_what_was_lost() -> None:
    assert chosen(again([P0, P1, D1], None, "prefill-1")) == ("decode-1", "prefill-1")
    assert chosen(again([replace(P1, num_queued_prefill_tokens=9999), D0], "decode-0", None)) == ("decode-0", "prefill-1")
    assert chosen(again([BOTH], None, None)) == ("both-0", "both-0")


def test_next_attempt_avoids_who_failed() -> None:
    busier = [P0, replace(P1, num_queued_prefill_tokens=9), D0, replace(D1, num_running=3)]
    assert chosen(again(busier, None, "prefill-0", "decode-0")) == ("decode-1", "prefill-0")
    assert chosen(again(busier, "decode-0", None, "prefill-0")) == ("decode-0", "prefill-1")
    assert chosen(again([P0, D0], None, "prefill-0", "decode-0")) == ("decode-0", "prefill-0")


def test_next_attempt_with_nowhere_to_go() -> None:
    assert again([P0], None, "prefill-0") is NotNow.NO_DECODE_WORKER
    assert again([P0, replace(D0, num_free_pages=9)], None, "prefill-0") is NotNow.NO_DECODE_WORKER
    assert again([D0], "decode-0", None) is NotNow.NO_PREFILL_WORKER


_loads = st.lists(
    st.builds(
        WorkerLoad,
        worker_id=st.sampled_from([WorkerId(f"w-{i}") for i in range(6)]),
        phases=st.sampled_from([frozenset({PREFILL}), frozenset({DECODE}), frozenset({PREFILL, DECODE})]),
        can_take_work=st.booleans(),
        page_size=st.just(16),
        num_free_pages=st.integers(-2, 8),
        num_running=st.integers(0, 4),
        max_num_seqs=st.just(4),
        num_queued_prefill_tokens=st.integers(0, 1000),
        max_prefill_tokens_per_step=st.just(512),
    ),
    max_size=6,
    unique_by=lambda load: load.worker_id,
)


@given(_loads, st.integers(1, 160))
def test_whatever_is_chosen_has_room(loads: list[WorkerLoad], num_tokens: int) -> None:
    placement = place(loads, demand=tokens(num_tokens))
    if isinstance(placement, NotNow):
        return
    by_id = {load.worker_id: load for load in loads}
    decode, prefill = by_id[placement.decode], by_id[placement.prefill]
    assert decode.can_take_work
    assert decode.can_hold(tokens(num_tokens))
    assert prefill.can_take_work
    assert prefill.can_start_at_once
    assert DECODE in decode.phases
    assert PREFILL in prefill.phases
    assert (placement.path is Path.LOCAL) == (decode is prefill) == (PREFILL in decode.phases)
