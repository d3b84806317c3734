"""One sequence's life against scripted workers on real sockets: every order of events, and an end in every state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from router.generation import Path
from serving_core.errors import InvalidRequest, NoCapacity, RefusalCode, WorkerLost
from serving_core.token_event import FailureKind
from serving_core.worker_status import PhaseName
from tests.unit.router.fake_worker import FakeWorker, SeenRelease, make_status
from tests.unit.router.pair import Pair, Pools, collect, make_request, open_pair, settle

PREFILL, DECODE = PhaseName.PREFILL, PhaseName.DECODE
REQUEST = make_request()
KEY = REQUEST.key


def has_started(num_times: int) -> Callable[[FakeWorker], bool]:
    return lambda worker: len(worker.starts) == num_times


async def test_happy_path(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    # 1. both legs are on their way, decode first, and the ticket goes to prefill
    generation = await pair.generator.start(REQUEST)
    assert (generation.path, generation.reason) == (Path.PAIR, "two_pools")
    assert [(seen.key, seen.attempt) for seen in decode.reserves] == [(KEY, 1)]
    assert [(seen.key, seen.ticket.attempt, seen.ticket.decode_worker_id) for seen in prefill.starts] == [(KEY, 1, "decode-0")]
    # 2. the early copy is shown before decode has said anything
    prefill.token(KEY, 0)
    events = aiter(generation)
    first = await asyncio.wait_for(anext(events), 5)
    assert (first.index, first.token_id) == (0, 100)
    # 3. decode repeats index 0 and goes on; each index is shown once
    for index in range(5):
        decode.token(KEY, index, last=index == 4)
    assert [event.token_id async for event in events] == [101, 102, 103, 104]
    # 4. one release on each side
    await settle(pair)
    assert prefill.releases_of(KEY) == [SeenRelease(phase=PREFILL, key=KEY, attempt=1)]
    assert decode.releases_of(KEY) == [SeenRelease(phase=DECODE, key=KEY, attempt=1)]
    # 5. closing afterwards changes nothing
    await generation.aclose()
    await settle(pair)
    assert len(decode.releases) == 1


async def test_early_copy_that_comes_last_is_dropped(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    decode.token(KEY, 0)
    decode.token(KEY, 1)
    events = aiter(generation)
    assert [(await anext(events)).index for _ in range(2)] == [0, 1]
    prefill.token(KEY, 0)
    decode.token(KEY, 2, last=True)
    assert [event.index async for event in events] == [2]
    await settle(pair)


async def test_prefill_ends_the_sequence_at_token_0(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    prefill.token(KEY, 0, last=True)
    assert await collect(generation) == [100]
    await settle(pair)
    assert len(decode.releases_of(KEY)) == len(prefill.releases_of(KEY)) == 1


async def test_tokens_of_other_attempts_and_sequences_are_dropped(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    prefill.token(KEY, 0, attempt=7, token_id=9)
    prefill.token(make_request("stranger").key, 0)
    for index in range(2):
        decode.token(KEY, index, last=index == 1)
    assert await collect(generation) == [100, 101]
    await settle(pair)


async def test_local_path(pair: Pair, pools: Pools) -> None:
    worker = await pools.add("both-0", PREFILL, DECODE)
    generation = await pair.generator.start(REQUEST)
    assert (generation.path, generation.reason) == (Path.LOCAL, "colocated")
    worker.token(KEY, 0)
    worker.token(KEY, 0)
    worker.token(KEY, 1, last=True)
    assert await collect(generation) == [100, 101]
    await settle(pair)
    assert {release.phase for release in worker.releases_of(KEY)} == {PREFILL, DECODE}
    assert len(worker.releases_of(KEY)) == 2


async def test_refused_reserve_waits_at_the_head_until_something_changes(pair: Pair, pools: Pools) -> None:
    await pools.add("prefill-0", PREFILL)
    decode = await pools.add("decode-0", DECODE)
    decode.refusals = [RefusalCode.RESOURCE_EXHAUSTED]
    # 1. the reserve is refused, and not asked again while nothing changes
    starting = asyncio.create_task(pair.generator.start(REQUEST))
    await decode.saw(lambda worker: len(worker.releases) == 1)
    assert (len(decode.reserves), len(pair.line)) == (1, 1)
    # 2. a later one does not overtake it
    later = asyncio.create_task(pair.generator.start(make_request("later")))
    await asyncio.sleep(0.05)
    assert (len(decode.reserves), len(pair.line)) == (1, 2)
    # 3. the worker tells of free pages: first come, first served
    decode.say(make_status())
    generation = await asyncio.wait_for(starting, 5)
    other = await asyncio.wait_for(later, 5)
    assert [seen.key.request_id for seen in decode.reserves] == ["r", "r", "later"]
    await generation.aclose()
    await other.aclose()
    await settle(pair)


async def test_pages_in_use_hold_the_next_sequence_back(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE, num_pages=4)
    first = await pair.generator.start(REQUEST)
    prefill.token(KEY, 0)
    waiting = asyncio.create_task(pair.generator.start(make_request("second")))
    await anext(aiter(first))
    assert len(pair.line) == 1
    decode.token(KEY, 0)
    decode.token(KEY, 1, last=True)
    second = await asyncio.wait_for(waiting, 5)
    assert len(decode.reserves) == 2
    await second.aclose()
    await settle(pair)


async def test_busy_prefill_worker_delays_the_reservation(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    request = make_request(num_prompt_tokens=9)  # above the 8 of one step
    first = await pair.generator.start(request)
    waiting = asyncio.create_task(pair.generator.start(make_request("second")))
    await asyncio.sleep(0.05)
    assert len(decode.reserves) == 1
    prefill.token(KEY, 0)
    second = await asyncio.wait_for(waiting, 5)
    await first.aclose()
    await second.aclose()
    await settle(pair)


async def test_decode_lost_before_it_began_goes_to_another_with_the_same_prefill(pair: Pair, pools: Pools) -> None:
    prefill = await pools.add("prefill-0", PREFILL)
    decodes = {name: await pools.add(name, DECODE) for name in ("decode-0", "decode-1")}
    # 1. the first attempt is on its way and token 0 has been shown
    generation = await pair.generator.start(REQUEST)
    lost = decodes.pop(prefill.starts[0].ticket.decode_worker_id)
    (left,) = decodes.values()
    prefill.token(KEY, 0, token_id=42)
    events = aiter(generation)
    assert (await anext(events)).token_id == 42
    # 2. decode dies; the same prefill worker gets the ticket of the other one, with token 0 taken
    await lost.die()
    await prefill.saw(lambda worker: len(worker.starts) == 2)
    assert (left.reserves[0].attempt, left.reserves[0].output_token_ids) == (2, (42,))
    assert (prefill.starts[1].ticket.attempt, prefill.starts[1].output_token_ids) == (2, (42,))
    assert prefill.releases == []
    # 3. it goes on where it was
    prefill.token(KEY, 0, attempt=2, token_id=42)
    left.token(KEY, 0, attempt=2, token_id=42)
    left.token(KEY, 1, attempt=2, last=True)
    assert [event.token_id async for event in events] == [101]
    await settle(pair)
    assert left.releases_of(KEY) == [SeenRelease(phase=DECODE, key=KEY, attempt=2)]
    assert prefill.releases_of(KEY) == [SeenRelease(phase=PREFILL, key=KEY, attempt=2)]


async def test_prefill_lost_before_the_commit_goes_to_another_on_the_same_reservation(pair: Pair, pools: Pools) -> None:
    decode = await pools.add("decode-0", DECODE)
    prefills = {name: await pools.add(name, PREFILL) for name in ("prefill-0", "prefill-1")}
    generation = await pair.generator.start(REQUEST)
    (lost,) = [worker for worker in prefills.values() if worker.starts]
    (left,) = [worker for worker in prefills.values() if not worker.starts]
    await lost.die()
    await left.saw(lambda worker: len(worker.starts) == 1)
    assert [seen.attempt for seen in decode.reserves] == [1, 2]
    assert decode.releases == []
    left.token(KEY, 0, attempt=2)
    decode.token(KEY, 0, attempt=1, token_id=13)  # of the fenced attempt
    decode.token(KEY, 0, attempt=2)
    decode.token(KEY, 1, attempt=2, last=True)
    assert await collect(generation) == [100, 101]
    await settle(pair)


async def test_prefill_lost_after_the_hand_off_is_harmless(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    decode.token(KEY, 0)
    events = aiter(generation)
    await anext(events)
    await prefill.die()
    await asyncio.sleep(0.05)
    decode.token(KEY, 1, last=True)
    assert [event.index async for event in events] == [1]
    await settle(pair)


async def test_failed_hand_off_is_tried_three_times(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    for attempt in (1, 2, 3):
        await prefill.saw(has_started(attempt))
        prefill.failed(KEY, attempt=attempt)
    with pytest.raises(WorkerLost, match="the way broke; it was tried 3 times without a new token"):
        await collect(generation)
    await settle(pair)
    assert [seen.attempt for seen in decode.reserves] == [1, 2, 3]
    assert {release.attempt for release in decode.releases_of(KEY)} == {2, 3}  # kept once, then taken anew


async def test_internal_failure_is_not_tried_again(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    decode.failed(KEY, kind=FailureKind.INTERNAL)
    with pytest.raises(WorkerLost, match="the way broke"):
        await collect(generation)
    await settle(pair)
    assert len(prefill.starts) == 1


@pytest.mark.parametrize(("index", "token_id"), [(0, 7), (2, 102)])
async def test_token_that_cannot_be_right_ends_the_sequence(pair: Pair, pools: Pools, index: int, token_id: int) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    prefill.token(KEY, 0)
    await anext(aiter(generation))
    decode.token(KEY, index, token_id=token_id)
    with pytest.raises(WorkerLost, match=f"token {token_id} at index {index}"):
        await collect(generation)
    await settle(pair)


async def test_prefill_has_only_token_0_to_send(pair: Pair, pools: Pools) -> None:
    prefill, _ = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    prefill.token(KEY, 0)
    prefill.token(KEY, 1)
    with pytest.raises(WorkerLost, match="prefill-0 sent token 101 at index 1"):
        await collect(generation)
    await settle(pair)


async def test_refused_start_goes_through_the_line_again(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    prefill.start_refusals = [RefusalCode.DRAINING]
    starting = asyncio.create_task(pair.generator.start(REQUEST))
    await decode.saw(lambda worker: len(worker.releases) == 1)
    prefill.say(make_status())
    generation = await asyncio.wait_for(starting, 5)
    assert [seen.attempt for seen in decode.reserves] == [1, 2]
    await generation.aclose()
    await settle(pair)


async def test_too_large_for_decode_is_the_clients_mistake(pair: Pair, pools: Pools) -> None:
    await pools.add("prefill-0", PREFILL)
    decode = await pools.add("decode-0", DECODE)
    decode.refusals = [RefusalCode.TOO_LARGE]
    with pytest.raises(InvalidRequest, match="too large"):
        await pair.generator.start(REQUEST)
    await settle(pair)


async def test_worker_lost_during_reserve_waits_for_another(pair: Pair, pools: Pools) -> None:
    await pools.add("prefill-0", PREFILL)
    decode = await pools.add("decode-0", DECODE)
    decode.answers.clear()
    starting = asyncio.create_task(pair.generator.start(REQUEST))
    await decode.saw(lambda worker: len(worker.reserves) == 1)
    await decode.die()
    other = await pools.add("decode-0", DECODE, incarnation="second")
    generation = await asyncio.wait_for(starting, 5)
    assert [seen.attempt for seen in other.reserves] == [2]
    await generation.aclose()
    await settle(pair)


async def test_reserve_that_is_never_answered_is_released_and_asked_again() -> None:
    async with open_pair(reserve_timeout_s=0.2) as pair:
        pools = Pools(pair)
        await pools.add("prefill-0", PREFILL)
        decode = await pools.add("decode-0", DECODE)
        decode.answers.clear()
        starting = asyncio.create_task(pair.generator.start(REQUEST))
        await decode.saw(lambda worker: len(worker.releases) == 1)
        decode.answers.set()
        decode.say(make_status())
        generation = await asyncio.wait_for(starting, 5)
        assert [seen.attempt for seen in decode.reserves] == [1, 2]
        await generation.aclose()
        await settle(pair)
        await pools.close()


async def test_no_worker_in_time() -> None:
    async with open_pair(worker_wait_s=0.1) as pair:
        with pytest.raises(NoCapacity, match="no ready prefill and no ready decode worker") as caught:
            await pair.generator.start(REQUEST)
        assert caught.value.retry_after_s > 0


async def test_waits_for_the_first_workers(pair: Pair, pools: Pools) -> None:
    starting = asyncio.create_task(pair.generator.start(REQUEST))
    await asyncio.sleep(0.05)
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await asyncio.wait_for(starting, 5)
    assert (len(prefill.starts), len(decode.reserves)) == (1, 1)
    await generation.aclose()
    await settle(pair)


async def test_abort_in_line(pair: Pair, pools: Pools) -> None:
    prefill = await pools.add("prefill-0", PREFILL)
    starting = asyncio.create_task(pair.generator.start(REQUEST))
    await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    decode = await pools.add("decode-0", DECODE)
    await settle(pair)
    assert not any((decode.reserves, prefill.starts, decode.releases, prefill.releases))


async def test_abort_during_reserve(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    decode.answers.clear()
    starting = asyncio.create_task(pair.generator.start(REQUEST))
    await decode.saw(lambda worker: len(worker.reserves) == 1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await settle(pair)
    assert len(decode.releases_of(KEY)) == 1
    assert not any((prefill.starts, prefill.releases))


async def test_abort_during_start(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    prefill.answers.clear()
    starting = asyncio.create_task(pair.generator.start(REQUEST))
    await prefill.saw(lambda worker: len(worker.starts) == 1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await settle(pair)
    assert len(decode.releases_of(KEY)) == len(prefill.releases_of(KEY)) == 1


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3])
async def test_abort_while_tokens_come(pair: Pair, pools: Pools, num_tokens: int) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    events = aiter(generation)
    for index in range(num_tokens):
        (decode if index else prefill).token(KEY, index)
        await anext(events)
    await generation.aclose()
    await generation.aclose()
    decode.token(KEY, num_tokens)
    assert [event async for event in events] == []
    await settle(pair)
    assert len(decode.releases_of(KEY)) == len(prefill.releases_of(KEY)) == 1


async def test_abort_during_a_second_attempt(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    decode.answers.clear()
    prefill.failed(KEY)
    await decode.saw(lambda worker: len(worker.reserves) == 2)
    await generation.aclose()
    await settle(pair)
    assert decode.releases_of(KEY) == [SeenRelease(phase=DECODE, key=KEY, attempt=2)]
    assert len(prefill.releases_of(KEY)) == 1


async def test_a_silent_worker_does_not_hold_up_the_end(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    await decode._server.stop(None)
    async with asyncio.timeout(0.1):
        await generation.aclose()
    await settle(pair)
    assert len(prefill.releases_of(KEY)) == 1


async def test_a_slow_client_holds_up_nobody(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    slow = await pair.generator.start(make_request("slow"))
    quick = await pair.generator.start(make_request("quick"))
    for key in (make_request("slow").key, make_request("quick").key):
        for index in range(5):
            decode.token(key, index, last=index == 4)
    assert len(await collect(quick)) == 5
    await settle(pair)  # the slow one is released although nobody has read a token of it
    assert len(prefill.releases) == len(decode.releases) == 2
    assert len(await collect(slow)) == 5


async def test_stop_ends_what_is_left(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE, num_pages=4)
    running = await pair.generator.start(REQUEST)
    waiting = asyncio.create_task(pair.generator.start(make_request("waiting")))
    await asyncio.sleep(0.05)
    # 1. drained: nobody new, the others go on
    pair.generator.begin_drain()
    with pytest.raises(NoCapacity, match="stopping"):
        await pair.generator.start(make_request("new"))
    assert pair.generator.num_live == 2
    # 2. closed: everybody is told, both sides are released
    await pair.generator.close()
    with pytest.raises(NoCapacity):
        await waiting
    with pytest.raises(WorkerLost, match="stopping"):
        await collect(running)
    pair.assert_no_leaks()
    assert len(decode.releases_of(KEY)) == len(prefill.releases_of(KEY)) == 1


async def test_what_can_never_fit(pair: Pair, pools: Pools) -> None:
    pair.generator.check_fits(num_prompt_tokens=10**6, max_tokens=1)  # nothing is known yet
    await pools.add("prefill-0", PREFILL, num_pages=4)
    await pools.add("decode-0", DECODE, num_pages=8)
    pair.generator.check_fits(num_prompt_tokens=16, max_tokens=16)
    with pytest.raises(InvalidRequest, match="17 tokens") as caught:
        pair.generator.check_fits(num_prompt_tokens=17, max_tokens=1)
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="an answer of up to 17") as caught:
        await pair.generator.start(make_request(num_prompt_tokens=16, max_tokens=17))
    assert caught.value.param == "max_tokens"
    assert pair.generator.max_model_len == 64
