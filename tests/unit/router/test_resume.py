"""Workers die, restart, evict and lose things at every state of a sequence; its client gets every token once, and later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.generation import Generation
from router.retry_budget import RetryPolicy
from serving_core.errors import NoCapacity, RefusalCode, WorkerLost
from serving_core.token_event import FailureKind, TokenEvent
from serving_core.worker_status import PhaseName
from tests.unit.router.fake_worker import FakeWorker, SeenRelease, make_status
from tests.unit.router.pair import LEASE_S, Pair, Pools, collect, make_request, open_pair, settle

PREFILL, DECODE = PhaseName.PREFILL, PhaseName.DECODE
REQUEST = make_request()  # 6 prompt tokens, 5 to come
KEY = REQUEST.key
TOKENS = [100, 101, 102, 103, 104]


async def started(worker: FakeWorker, num_times: int) -> None:
    await worker.saw(lambda worker: len(worker.starts) >= num_times)


async def reserved(worker: FakeWorker, num_times: int) -> None:
    await worker.saw(lambda worker: len(worker.reserves) >= num_times)


def write_on(decode: FakeWorker, *, attempt: int, num_known: int) -> None:
    """What a decode worker says that has taken ``num_known`` tokens over: the last of them, and all that follow."""
    for index in range(max(0, num_known - 1), len(TOKENS)):
        decode.token(KEY, index, attempt=attempt, last=index == len(TOKENS) - 1)


async def first_tokens(generation: Generation, prefill: FakeWorker, decode: FakeWorker, num: int) -> AsyncIterator[TokenEvent]:
    """The iteration, with ``num`` tokens out and the hand-off confirmed."""
    prefill.token(KEY, 0)
    events = aiter(generation)
    for index in range(num):
        decode.token(KEY, index)
        event = await asyncio.wait_for(anext(events), 5)
        assert event.token_id == TOKENS[index]
    return events


async def rest(events: AsyncIterator[TokenEvent]) -> list[int]:
    async with asyncio.timeout(5):
        return [event.token_id async for event in events]


# -- a decode worker goes, with tokens out --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_out", [1, 2, 3, 4])
async def test_decode_lost_mid_stream_goes_on_elsewhere(pair: Pair, pools: Pools, num_out: int) -> None:
    prefill = await pools.add("prefill-0", PREFILL)
    decodes = {name: await pools.add(name, DECODE) for name in ("decode-0", "decode-1")}
    # 1. some tokens are out
    generation = await pair.generator.start(REQUEST)
    lost = decodes.pop(prefill.starts[0].ticket.decode_worker_id)
    (other,) = decodes.values()
    events = await first_tokens(generation, prefill, lost, num_out)
    # 2. the worker dies; prefill gets the prompt and the log again, for another decode worker
    await lost.die()
    await started(prefill, 2)
    log = tuple(TOKENS[:num_out])
    assert [(seen.attempt, seen.output_token_ids, seen.num_evictions) for seen in other.reserves] == [(2, log, 0)]
    assert (prefill.starts[1].ticket.attempt, prefill.starts[1].output_token_ids) == (2, log)
    # 3. copies of what is known change nothing; the rest comes once
    prefill.token(KEY, 0, attempt=2)
    write_on(other, attempt=2, num_known=num_out)
    assert await rest(events) == TOKENS[num_out:]
    # 4. both attempts are released
    await settle(pair)
    assert other.releases_of(KEY) == [SeenRelease(phase=DECODE, key=KEY, attempt=2)]
    assert [release.attempt for release in prefill.releases_of(KEY)] == [1, 2]


async def test_decode_lost_mid_stream_goes_on_after_its_restart(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    events = await first_tokens(generation, prefill, decode, 2)
    await decode.die()
    # it waits, and holds nothing meanwhile
    await prefill.saw(lambda worker: len(worker.releases) == 1)
    await prefill.saw(lambda worker: worker.renewals[-1] == frozenset())
    new = await pools.add("decode-0", DECODE, incarnation="second")
    await started(prefill, 2)
    assert [(seen.attempt, seen.output_token_ids) for seen in new.reserves] == [(2, (100, 101))]
    write_on(new, attempt=2, num_known=2)
    assert await rest(events) == TOKENS[2:]
    await settle(pair)


async def test_frozen_decode_worker_that_wakes_adds_nothing(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    events = await first_tokens(generation, prefill, decode, 2)
    # 1. silent for so long that its link ends; then the same process is back, and tells what it did meanwhile
    await decode.hang_up()
    await decode.join(pair.address)
    await started(prefill, 2)
    decode.token(KEY, 2, attempt=1, token_id=666)
    decode.failed(KEY, attempt=1, kind=FailureKind.INTERNAL)
    # 2. only the newer attempt is heard
    write_on(decode, attempt=2, num_known=2)
    assert await rest(events) == TOKENS[2:]
    await settle(pair)


async def test_every_worker_dies_several_times(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    events = aiter(generation)
    for index in range(len(TOKENS)):
        attempt = index + 1
        assert prefill.starts[-1].output_token_ids == tuple(TOKENS[:index])
        if index:
            decode.token(KEY, index - 1, attempt=attempt)
        decode.token(KEY, index, attempt=attempt, last=index == len(TOKENS) - 1)
        assert (await asyncio.wait_for(anext(events), 5)).token_id == TOKENS[index]
        if index < len(TOKENS) - 1:
            await decode.die()
            await prefill.die()
            prefill = await pools.add("prefill-0", PREFILL, incarnation=f"p{attempt}")
            decode = await pools.add("decode-0", DECODE, incarnation=f"d{attempt}")
            await started(prefill, 1)
    await settle(pair)


async def test_resume_on_the_local_path(pair: Pair, pools: Pools) -> None:
    worker = await pools.add("both-0", PREFILL, DECODE)
    generation = await pair.generator.start(REQUEST)
    worker.token(KEY, 0)
    for index in range(3):
        worker.token(KEY, index)
    events = aiter(generation)
    assert [(await asyncio.wait_for(anext(events), 5)).token_id for _ in range(3)] == TOKENS[:3]
    await worker.die()
    new = await pools.add("both-0", PREFILL, DECODE, incarnation="second")
    await started(new, 1)
    new.token(KEY, 0, attempt=2)
    write_on(new, attempt=2, num_known=3)
    assert await rest(events) == TOKENS[3:]
    assert (generation.path.value, generation.reason) == ("local", "colocated")
    await settle(pair)


async def test_confirmation_with_another_token_is_an_error(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    events = await first_tokens(generation, prefill, decode, 2)
    decode.failed(KEY)
    await started(prefill, 2)
    decode.token(KEY, 1, attempt=2, token_id=7)
    with pytest.raises(WorkerLost, match="token 7 at index 1 where 2 tokens were known"):
        await rest(events)
    await settle(pair)


# -- nobody is left ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_out", [0, 3])
@pytest.mark.parametrize("lost", ["prefill", "decode", "both"])
async def test_no_worker_comes_back_in_time(num_out: int, lost: str) -> None:
    async with open_pair(worker_wait_s=0.8) as pair:
        pools = Pools(pair)
        workers = {"prefill": await pools.add("prefill-0", PREFILL), "decode": await pools.add("decode-0", DECODE)}
        generation = await pair.generator.start(REQUEST)
        events = (
            await first_tokens(generation, workers["prefill"], workers["decode"], num_out) if num_out else aiter(generation)
        )
        for name in ("prefill", "decode"):
            if lost in (name, "both"):
                await workers[name].die()
        if lost == "prefill" and num_out:  # nobody needs it any more
            write_on(workers["decode"], attempt=1, num_known=num_out)
            assert await rest(events) == TOKENS[num_out:]
        else:
            with pytest.raises(NoCapacity, match="no ready"):
                await rest(events)
        await settle(pair)
        await pools.close()


async def test_a_long_answer_may_still_wait_for_its_worker() -> None:
    """The wait counts from the loss, not from the arrival long ago."""
    async with open_pair(worker_wait_s=0.6) as pair:
        pools = Pools(pair)
        prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
        generation = await pair.generator.start(REQUEST)
        events = await first_tokens(generation, prefill, decode, 2)
        await asyncio.sleep(0.7)
        await decode.die()
        await asyncio.sleep(0.2)
        new = await pools.add("decode-0", DECODE, incarnation="second")
        await started(prefill, 2)
        write_on(new, attempt=2, num_known=2)
        assert await rest(events) == TOKENS[2:]
        await settle(pair)
        await pools.close()


# -- a fault in every state before the hand-off -----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
@pytest.mark.parametrize("state", ["reservation", "prefill_start", "computing", "token 0 out"])
async def test_worker_restarts_before_the_hand_off(pair: Pair, pools: Pools, phase: PhaseName, state: str) -> None:
    workers = {PREFILL: await pools.add("prefill-0", PREFILL), DECODE: await pools.add("decode-0", DECODE)}
    # 1. the sequence is brought into the state
    if state == "reservation":
        workers[DECODE].answers.clear()
    elif state == "prefill_start":
        workers[PREFILL].answers.clear()
    starting = asyncio.create_task(pair.generator.start(REQUEST))
    await (reserved(workers[DECODE], 1) if state == "reservation" else started(workers[PREFILL], 1))
    if state == "token 0 out":
        workers[PREFILL].token(KEY, 0)
        assert (await asyncio.wait_for(anext(aiter(await starting)), 5)).token_id == TOKENS[0]
    # 2. one worker dies and is back; what did not die answers again
    await workers[phase].die()
    for worker in workers.values():
        worker.answers.set()
    workers[phase] = await pools.add(f"{phase.value}-0", phase, incarnation="second")
    # 3. the next attempt is made with both, and knows what is out
    num_known = int(state == "token 0 out")
    await workers[PREFILL].saw(lambda worker: bool(worker.starts) and worker.starts[-1].ticket.attempt > 1)
    start = workers[PREFILL].starts[-1]
    assert start.output_token_ids == tuple(TOKENS[:num_known])
    generation = await asyncio.wait_for(starting, 5)
    workers[PREFILL].token(KEY, 0, attempt=start.ticket.attempt)
    write_on(workers[DECODE], attempt=start.ticket.attempt, num_known=num_known)
    assert await collect(generation) == TOKENS[num_known:]
    await settle(pair)
    for worker in workers.values():
        assert worker.releases_of(KEY)[-1].attempt == start.ticket.attempt


async def test_prefill_lost_after_the_commit_costs_nothing(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    prefill.token(KEY, 0)
    events = aiter(generation)
    await anext(events)
    # it dies with the commit on its way; decode says only later that it has the sequence
    await prefill.die()
    await asyncio.sleep(0.1)
    write_on(decode, attempt=1, num_known=1)
    assert await rest(events) == TOKENS[1:]
    await settle(pair)
    assert len(decode.reserves) == 1


async def test_decode_lost_while_it_was_to_confirm(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    await prefill.die()
    await decode.die()
    prefill = await pools.add("prefill-0", PREFILL, incarnation="second")
    decode = await pools.add("decode-0", DECODE, incarnation="second")
    await started(prefill, 1)
    write_on(decode, attempt=2, num_known=0)
    assert await collect(generation) == TOKENS
    await settle(pair)


async def test_closed_while_decode_was_to_confirm(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    await prefill.die()
    await asyncio.sleep(0.05)
    await generation.aclose()
    await settle(pair)
    await asyncio.sleep(0.4)  # longer than decode may take
    assert len(decode.reserves) == len(decode.releases_of(KEY)) == 1


# -- eviction ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_out", [0, 1, 3])
async def test_evicted_again_and_again(pair: Pair, pools: Pools, num_out: int) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    events = await first_tokens(generation, prefill, decode, num_out) if num_out else aiter(generation)
    # more often than attempts may fail: an eviction costs none of them
    for num_evictions in range(1, 6):
        decode.evict(KEY, attempt=num_evictions)
        await started(prefill, num_evictions + 1)
        seen = decode.reserves[-1]
        assert (seen.attempt, seen.num_evictions) == (num_evictions + 1, num_evictions)
        assert seen.output_token_ids == tuple(TOKENS[:num_out])
    decode.token(KEY, num_out, attempt=5, token_id=666)  # of an attempt that is over
    write_on(decode, attempt=6, num_known=num_out)
    assert await rest(events) == TOKENS[num_out:]
    await settle(pair)
    assert 'reason="eviction",role="router",worker="router"} 5.0' in pair.metrics.render().decode()


async def test_evicted_while_prefill_was_asked(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    prefill.answers.clear()
    starting = asyncio.create_task(pair.generator.start(REQUEST))
    await started(prefill, 1)
    decode.evict(KEY)
    await reserved(decode, 2)
    prefill.answers.set()
    generation = await asyncio.wait_for(starting, 5)
    assert generation.reason == "eviction"
    write_on(decode, attempt=2, num_known=0)
    assert await collect(generation) == TOKENS
    await settle(pair)


async def test_evicted_one_comes_before_those_that_arrived_later(pair: Pair, pools: Pools) -> None:
    # 1. one sequence decodes, the next is in line: 2 pages and one to grow into, of 4
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE, num_pages=4)
    generation = await pair.generator.start(REQUEST)
    events = await first_tokens(generation, prefill, decode, 2)
    later = asyncio.create_task(pair.generator.start(make_request("later", max_tokens=2)))
    await asyncio.sleep(0.05)
    assert (len(pair.line), len(decode.reserves)) == (1, 1)
    # 2. what the eviction frees goes to the evicted one, though the other stands in line already
    decode.evict(KEY)
    await started(prefill, 2)
    assert [(seen.key.request_id, seen.attempt) for seen in decode.reserves] == [("r", 1), ("r", 2)]
    # 3. the other one follows
    write_on(decode, attempt=2, num_known=2)
    assert await rest(events) == TOKENS[2:]
    await (await asyncio.wait_for(later, 5)).aclose()
    await settle(pair)


async def test_no_room_after_an_eviction_costs_no_attempt(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    events = await first_tokens(generation, prefill, decode, 2)
    decode.refusals = [RefusalCode.RESOURCE_EXHAUSTED] * 5
    decode.evict(KEY)
    for num_reserves in range(2, 7):
        await decode.saw(lambda worker, num=num_reserves: len(worker.releases) == num)  # type: ignore[misc]
        decode.say(make_status())
    await started(prefill, 2)
    assert prefill.starts[-1].ticket.attempt == 7
    write_on(decode, attempt=7, num_known=2)
    assert await rest(events) == TOKENS[2:]
    await settle(pair)


# -- budget, pauses, holds --------------------------------------------------------------------------------------------------


async def test_budget_is_restored_by_a_new_token(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    generation = await pair.generator.start(REQUEST)
    attempt = 1
    # two failures for each token: many more in all than may come in a row
    for index in range(len(TOKENS) - 1):
        for _ in range(2):
            decode.failed(KEY, attempt=attempt)
            attempt += 1
            await started(prefill, attempt)
        decode.token(KEY, index, attempt=attempt)
        assert (await asyncio.wait_for(anext(aiter(generation)), 5)).token_id == TOKENS[index]
    for _ in range(3):
        await started(prefill, attempt)
        decode.failed(KEY, attempt=attempt)
        attempt += 1
    with pytest.raises(WorkerLost, match="3 times without a new token"):
        await collect(generation)
    await settle(pair)


async def test_close_ends_a_pause() -> None:
    async with open_pair(retry_policy=RetryPolicy(first_pause_s=60, max_pause_s=60)) as pair:
        pools = Pools(pair)
        prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
        generation = await pair.generator.start(REQUEST)
        prefill.failed(KEY)
        # what is kept for the next attempt is still wanted
        await asyncio.sleep(LEASE_S)
        assert prefill.renewals[-1] == decode.renewals[-1] == {KEY}
        await generation.aclose()
        await settle(pair)
        assert len(decode.releases_of(KEY)) == len(prefill.releases_of(KEY)) == 1
        await pools.close()


async def test_legs_lost_in_a_pause_are_replaced() -> None:
    async with open_pair(retry_policy=RetryPolicy(first_pause_s=0.3)) as pair:
        pools = Pools(pair)
        prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
        generation = await pair.generator.start(REQUEST)
        prefill.failed(KEY)
        await asyncio.sleep(0.05)
        await prefill.die()
        await decode.die()
        prefill = await pools.add("prefill-0", PREFILL, incarnation="second")
        decode = await pools.add("decode-0", DECODE, incarnation="second")
        await started(prefill, 1)
        write_on(decode, attempt=2, num_known=0)
        assert await collect(generation) == TOKENS
        await settle(pair)
        await pools.close()


async def test_what_failed_twice_goes_to_another_pair(pair: Pair, pools: Pools) -> None:
    prefills = {name: await pools.add(name, PREFILL) for name in ("prefill-0", "prefill-1")}
    decodes = {name: await pools.add(name, DECODE) for name in ("decode-0", "decode-1")}
    generation = await pair.generator.start(REQUEST)
    bad_prefill = next(worker for worker in prefills.values() if worker.starts)
    bad_decode = decodes[bad_prefill.starts[0].ticket.decode_worker_id]
    # 1. the first retry stays where everything is
    bad_prefill.failed(KEY)
    await started(bad_prefill, 2)
    assert len(bad_decode.reserves) == 2
    # 2. the second goes elsewhere on both sides
    bad_prefill.failed(KEY, attempt=2)
    (prefill,) = [worker for worker in prefills.values() if worker is not bad_prefill]
    (decode,) = [worker for worker in decodes.values() if worker is not bad_decode]
    await started(prefill, 1)
    write_on(decode, attempt=3, num_known=0)
    assert await collect(generation) == TOKENS
    await settle(pair)
    assert len(bad_prefill.releases_of(KEY)) == len(bad_decode.releases_of(KEY)) == 1


async def test_a_decode_worker_that_failed_is_avoided_where_prefill_is_kept(pair: Pair, pools: Pools) -> None:
    prefill, bad = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
    # 1. both have as few sequences, so the first in order is asked; it fails the reservation
    other = await pools.add("decode-1", DECODE)
    bad.refusals = [RefusalCode.MALFORMED]
    generation = await asyncio.wait_for(pair.generator.start(REQUEST), 5)
    # 2. it has room as before, but the next attempt goes to the other
    assert ([seen.attempt for seen in bad.reserves], [seen.attempt for seen in other.reserves]) == ([1], [2])
    prefill.token(KEY, 0, attempt=2)
    write_on(other, attempt=2, num_known=0)
    assert await collect(generation) == TOKENS
    await settle(pair)


async def test_a_hold_ends_by_itself() -> None:
    async with open_pair(max_hold_s=0.1) as pair:
        pools = Pools(pair)
        await pools.add("prefill-0", PREFILL)
        decode = await pools.add("decode-0", DECODE)
        decode.refusals = [RefusalCode.RESOURCE_EXHAUSTED] * 2
        generation = await asyncio.wait_for(pair.generator.start(REQUEST), 5)
        assert [seen.attempt for seen in decode.reserves] == [1, 2, 3]
        await generation.aclose()
        await settle(pair)
        await pools.close()


async def test_two_that_are_turned_away_do_not_call_each_other_back(pair: Pair, pools: Pools) -> None:
    await pools.add("prefill-0", PREFILL)
    decode = await pools.add("decode-0", DECODE)
    decode.refusals = [RefusalCode.RESOURCE_EXHAUSTED] * 100
    decode.answers.clear()
    waiting = [asyncio.create_task(pair.generator.start(make_request(name))) for name in ("a", "b")]
    await reserved(decode, 2)
    decode.answers.set()
    await asyncio.sleep(0.2)
    assert len(decode.reserves) == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await settle(pair)


# -- a worker's engine is stuck ---------------------------------------------------------------------------------------------


async def test_a_stuck_engine_is_a_lost_worker() -> None:
    async with open_pair(max_silence_s=0.5) as pair, asyncio.TaskGroup() as tasks:
        pools = Pools(pair)
        prefill, stuck = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)
        reporting = tasks.create_task(report_status(prefill))
        # 1. two tokens are out, then its link stands but says nothing
        generation = await pair.generator.start(REQUEST)
        events = await first_tokens(generation, prefill, stuck, 2)
        stuck.is_stuck = True
        await stuck.link_ended()
        # 2. it dials again, still stuck: nothing goes there
        await stuck.join(pair.address)
        await asyncio.sleep(0.1)
        assert len(stuck.reserves) == 1
        # 3. its engine runs again, and so does the sequence
        stuck.say(make_status())
        await reserved(stuck, 2)
        write_on(stuck, attempt=2, num_known=2)
        assert await rest(events) == TOKENS[2:]
        await settle(pair)
        reporting.cancel()
        await pools.close()


async def report_status(worker: FakeWorker) -> None:
    while True:
        worker.say(make_status())
        await asyncio.sleep(0.1)


# -- leases and room --------------------------------------------------------------------------------------------------------


async def test_renewals_name_what_is_wanted_across_a_resume(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE)

    async def named(by_prefill: bool, by_decode: bool) -> None:
        for worker, is_named in ((prefill, by_prefill), (decode, by_decode)):
            num = len(worker.renewals)
            await worker.saw(lambda worker, num=num: len(worker.renewals) > num + 1)  # type: ignore[misc]
            assert worker.renewals[-1] == ({KEY} if is_named else frozenset())

    # 1. on both until the hand-off, on decode after it
    generation = await pair.generator.start(REQUEST)
    await named(True, True)
    events = await first_tokens(generation, prefill, decode, 2)
    await named(False, True)
    # 2. nowhere while it waits in line
    decode.say(make_status(is_draining=True))
    await pair.directory.wait_until(lambda: "decode" in pair.directory.missing_phases())
    decode.evict(KEY)
    await named(False, False)
    # 3. on both again, until the next hand-off
    decode.say(make_status())
    await started(prefill, 2)
    await named(True, True)
    decode.token(KEY, 1, attempt=2)
    await named(False, True)
    # 4. and nowhere after the end
    write_on(decode, attempt=2, num_known=2)
    assert await rest(events) == TOKENS[2:]
    await settle(pair)
    await named(False, False)


async def test_room_is_booked_as_a_sequence_grows(pair: Pair, pools: Pools) -> None:
    prefill, decode = await pools.add("prefill-0", PREFILL), await pools.add("decode-0", DECODE, num_pages=16)
    request = make_request(num_prompt_tokens=4, max_tokens=12)
    generation = await pair.generator.start(request)
    (worker,) = (worker for worker in pair.directory.connected() if DECODE in worker.hello.phases)
    # prompt and one token in pages of 4, one page to grow into, never more than the 4 of prompt and answer at their longest
    free = [worker.load().num_free_pages]
    prefill.token(KEY, 0)
    events = aiter(generation)
    for index in range(9):
        decode.token(KEY, index)
        await asyncio.wait_for(anext(events), 5)
        free.append(worker.load().num_free_pages)
    assert free == [13, 13, 13, 13, 12, 12, 12, 12, 12, 12]
    decode.evict(KEY)
    await started(prefill, 2)
    assert worker.load().num_free_pages == 12
    await generation.aclose()
    await settle(pair)
    assert worker.load().num_free_pages == 16
