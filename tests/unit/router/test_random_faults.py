"""Many sequences while workers refuse, fail and die and clients leave, at random moments of a printed seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from serving_core.errors import RefusalCode, WorkerLost
from serving_core.worker_status import PhaseName
from tests.unit.router.fake_worker import FakeWorker, SeenStart, make_status
from tests.unit.router.pair import Pair, make_request, open_pair

NUM_TOKENS = 6
NUM_SEQUENCES = 80


class Pools:
    """Two prefill and two decode workers that play their parts by themselves, with a fault now and then."""

    def __init__(self, pair: Pair, chance: random.Random) -> None:
        self._pair = pair
        self._chance = chance
        self._workers = {
            **{f"prefill-{i}": FakeWorker(f"prefill-{i}", PhaseName.PREFILL) for i in range(2)},
            **{f"decode-{i}": FakeWorker(f"decode-{i}", PhaseName.DECODE) for i in range(2)},
        }
        self._all: list[FakeWorker] = []
        self._playing: set[asyncio.Task[None]] = set()
        self._num_incarnations = 0

    async def open(self) -> None:
        for worker_id in list(self._workers):
            await self._join(worker_id)

    async def kill_one(self) -> None:
        worker_id = self._chance.choice(list(self._workers))
        await self._workers[worker_id].die()
        await self._join(worker_id)

    async def close(self) -> None:
        for task in self._playing:
            task.cancel()
        for worker in self._all:
            await worker.die()

    def assert_every_leg_was_released(self) -> None:
        """By those workers that still live; at most one release of each kind and attempt. A call that was cancelled before it
        arrived may be released as well."""
        for worker in self._workers.values():
            told = {seen.key for seen in worker.reserves} | {seen.key for seen in worker.starts}
            assert told <= {release.key for release in worker.releases}
            assert max(Counter(worker.releases).values(), default=1) == 1

    async def _join(self, worker_id: str) -> None:
        phase = PhaseName(worker_id.split("-", maxsplit=1)[0])
        self._num_incarnations += 1
        worker = FakeWorker(worker_id, phase, incarnation=str(self._num_incarnations))
        worker.on_start = self._play
        worker.refusals = [RefusalCode.RESOURCE_EXHAUSTED] * self._chance.randrange(3)
        worker.start_refusals = [RefusalCode.STALE_ATTEMPT] * self._chance.randrange(2)
        self._workers[worker_id] = worker
        self._all.append(worker)
        await worker.join(self._pair.address)

    def _play(self, start: SeenStart) -> None:
        task = asyncio.create_task(self._play_parts(start))
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)

    async def _play_parts(self, start: SeenStart) -> None:
        attempt = start.ticket.attempt
        prefill = next(worker for worker in self._workers.values() if start in worker.starts)
        decode = self._workers[start.ticket.decode_worker_id]
        await self._pause()
        if self._chance.random() < 0.1:
            prefill.failed(start.key, attempt=attempt)
            return
        prefill.token(start.key, 0, attempt=attempt)
        for index in range(NUM_TOKENS):
            await self._pause()
            decode.token(start.key, index, attempt=attempt, last=index == NUM_TOKENS - 1)
            decode.say(make_status())

    async def _pause(self) -> None:
        await asyncio.sleep(self._chance.random() * 0.01)


async def be_a_client(pair: Pair, name: str, chance: random.Random) -> str:
    """How it went: finished, left, or lost."""
    patience = chance.randrange(NUM_TOKENS + 1) if chance.random() < 0.4 else NUM_TOKENS + 1
    try:
        generation = await pair.generator.start(make_request(name, max_tokens=NUM_TOKENS))
    except WorkerLost:
        return "lost"
    received: list[int] = []
    try:
        if patience == 0:
            return "left"
        async for event in generation:
            received.append(event.token_id)
            if len(received) == patience:
                return "left"
    except WorkerLost:
        return "lost"
    finally:
        await generation.aclose()
        assert received == list(range(100, 100 + len(received)))
    assert len(received) == NUM_TOKENS
    return "finished"


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_nothing_is_left_behind(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with open_pair(lease_s=1.0) as pair:
        pools = Pools(pair, chance)
        await pools.open()
        # 1. clients come one after the other; some give up while they wait; now and then a worker dies
        clients: list[asyncio.Task[str]] = []
        for number in range(NUM_SEQUENCES):
            clients.append(asyncio.create_task(be_a_client(pair, f"s{number}", random.Random(f"{seed}/{number}"))))
            await asyncio.sleep(chance.random() * 0.01)
            if chance.random() < 0.1:
                chance.choice(clients).cancel()
            if chance.random() < 0.08:
                await pools.kill_one()
        # 2. each of them comes to an end
        async with asyncio.timeout(20):
            ends = await asyncio.gather(*clients, return_exceptions=True)
        unexpected = [end for end in ends if isinstance(end, Exception) and not isinstance(end, asyncio.CancelledError)]
        assert unexpected == []
        assert ends.count("finished") > NUM_SEQUENCES // 4
        # 3. nothing is left, here or on a worker that lives
        async with asyncio.timeout(5):
            await pair.generator.wait_idle()
        pair.assert_no_leaks()
        pools.assert_every_leg_was_released()
        await pools.close()
