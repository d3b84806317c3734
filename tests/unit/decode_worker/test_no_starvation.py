"""Under any load that fits, with pools as small as they may be, every request ends with the answer of an undisturbed run."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serving_core.generate_request import GenerateRequest
from tests.pages import assert_no_leaks
from tests.phases import LAYOUT, DecodeSide, PrefillSide, expected_tokens, make_request
from tests.resuming_router import Journey, ResumingRouter

MAX_EVICTIONS = 4
"""Of a sequence of at most nine pages: one when nothing is kept for it, then with room for two, four and eight more pages the
last of which settles it. Nobody is evicted once settled."""

sizes = st.tuples(st.integers(1, 16), st.integers(1, 20))


def num_pages_of(request: GenerateRequest) -> int:
    return LAYOUT.num_pages_for(request.max_total_tokens)


def make_requests(drawn: list[tuple[int, int]]) -> list[GenerateRequest]:
    return [
        make_request(num_prompt_tokens, name=f"r{index}", max_tokens=max_tokens)
        for index, (num_prompt_tokens, max_tokens) in enumerate(drawn)
    ]


def check(router: ResumingRouter) -> None:
    for journey in router.journeys:
        request = journey.request
        assert journey.token_ids == expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)
        assert journey.num_evictions <= MAX_EVICTIONS
    assert_no_leaks(router.decode.pool)
    assert_no_leaks(router.prefill.pool)


@settings(max_examples=80, deadline=None)
@given(drawn=st.lists(sizes, min_size=1, max_size=8), num_spare=st.integers(0, 4), data=st.data())
def test_every_request_of_a_pair_ends_right(drawn: list[tuple[int, int]], num_spare: int, data: st.DataObject) -> None:
    requests = make_requests(drawn)
    num_pages = max(map(num_pages_of, requests)) + num_spare
    decode = DecodeSide(num_pages=num_pages, max_waiting=data.draw(st.integers(0, 4)))
    router = ResumingRouter(PrefillSide(decode.clock, num_pages=num_pages, max_num_batched_tokens=7), decode)
    # 1. Requests come, hand-offs are late, the decode worker may die at any point.
    is_death_due = data.draw(st.booleans())
    death_turn = data.draw(st.integers(0, 30))
    for turn in range(40):
        if turn < len(requests):
            router.send(requests[turn])
        if is_death_due and turn == death_turn:
            router.replace_decode(DecodeSide(decode.clock, num_pages=num_pages, name="decode-1", incarnation="d1"))
        router.turn(is_delivering=data.draw(st.booleans()))
        router.decode.pool.check()
    # 2. Then nothing disturbs them any more.
    router.run(1000)
    check(router)


@settings(max_examples=80, deadline=None)
@given(drawn=st.lists(sizes, min_size=1, max_size=8), num_spare=st.integers(0, 4))
def test_every_request_of_a_worker_with_both_phases_ends_right(drawn: list[tuple[int, int]], num_spare: int) -> None:
    requests = make_requests(drawn)
    decode = DecodeSide(num_pages=max(map(num_pages_of, requests)) + num_spare)
    router = ResumingRouter(PrefillSide(beside=decode, max_num_batched_tokens=7), decode)
    for request in requests:
        router.send(request)
    router.run(1500)
    check(router)


def test_new_requests_without_end_starve_nobody() -> None:
    decode = DecodeSide(num_pages=9, max_waiting=4)
    router = ResumingRouter(PrefillSide(decode.clock, num_pages=9), decode)
    # 1. As many small requests as there is room for, and the next ones always waiting.
    large = [make_request(16, name=f"large{index}", max_tokens=20) for index in range(3)]
    watched: list[Journey] = []
    num_sent = 0
    for turn in range(1500):
        if turn in (10, 40, 70):
            watched.append(router.send(large[len(watched)]))
        router.journeys = [journey for journey in router.journeys if not journey.is_finished or journey in watched]
        while sum(not journey.is_finished for journey in router.journeys) < 8:
            router.send(make_request(3, name=f"small{num_sent}", max_tokens=9))
            num_sent += 1
        router.turn()
        if len(watched) == 3 and all(journey.is_finished for journey in watched):
            break
    # 2. The large ones have ended, though each fills the pool, and the small ones went on meanwhile.
    for journey in watched:
        assert journey.token_ids == expected_tokens(journey.request.prompt_token_ids, 20), journey
        assert journey.num_evictions <= MAX_EVICTIONS
    assert num_sent > 20
