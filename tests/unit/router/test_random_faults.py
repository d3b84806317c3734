"""Many sequences while workers refuse, fail, evict, freeze, die and restart and clients leave, at random moments of a printed
seed. Whoever stays gets every token, each once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from router.retry_budget import RetryPolicy
from serving_core.errors import RefusalCode
from serving_core.ids import SequenceKey
from serving_core.token_event import FailureKind
from serving_core.worker_status import PhaseName
from tests.unit.router.fake_worker import FakeWorker, SeenStart, make_key, make_status
from tests.unit.router.pair import Pair, make_request, open_pair

NUM_TOKENS = 10
NUM_SEQUENCES = 80
LEASE_S = 0.09
PATIENT = RetryPolicy(max_attempts=100, first_pause_s=0.002, max_pause_s=0.02)


class Pools:
    """Two workers a phase that play their parts by themselves, with a fault now and then.

    ``ended`` says when a client had its end. Renewals are checked as they come: whoever decodes here is named, and nobody whose
    client has been gone for a while.
    """

    def __init__(self, pair: Pair, chance: random.Random, *, is_colocated: bool) -> None:
        self.ended: dict[SequenceKey, float] = {}
        self.num_faults: Counter[str] = Counter()
        self.wrong_renewals: list[str] = []
        self._pair = pair
        self._chance = chance
        names = ["both-0", "both-1"] if is_colocated else ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        self._names = names
        self._workers: dict[str, FakeWorker] = {}
        self._all: list[FakeWorker] = []
        self._playing: set[asyncio.Task[None]] = set()
        self._decoding: dict[tuple[FakeWorker, SequenceKey], int] = {}
        """Since which renewal."""
        self._num_incarnations = 0

    async def open(self) -> None:
        for worker_id in self._names:
            await self._join(worker_id)

    async def trouble_one(self) -> None:
        """A worker dies and is restarted after a moment, or is silent until its link has ended."""
        worker = self._workers[self._chance.choice(self._names)]
        self._decoding = {(of, key): since for (of, key), since in self._decoding.items() if of is not worker}
        if self._chance.random() < 0.3:
            self.num_faults["freeze"] += 1
            await worker.hang_up()
            await self._pause()
            await worker.join(self._pair.address)
        else:
            self.num_faults["death"] += 1
            await worker.die()
            await asyncio.sleep(self._chance.random() * 0.05)
            await self._join(worker.worker_id)

    async def close(self) -> None:
        for task in self._playing:
            task.cancel()
        for worker in self._all:
            await worker.die()

    def assert_every_leg_was_released(self) -> None:
        """By those workers that still live, up to the last attempt they were told of."""
        for worker in self._workers.values():
            for key, attempt in _last_attempts(worker).items():
                assert max((release.attempt for release in worker.releases if release.key == key), default=0) >= attempt
            assert max(Counter(worker.releases).values(), default=1) == 1

    async def _join(self, worker_id: str) -> None:
        name = worker_id.split("-", maxsplit=1)[0]
        phases = list(PhaseName) if name == "both" else [PhaseName(name)]
        self._num_incarnations += 1
        worker = FakeWorker(worker_id, *phases, incarnation=str(self._num_incarnations))
        worker.on_start = self._play
        worker.on_renewal = self._check_renewal
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
        key, attempt = start.key, start.ticket.attempt
        prefill = next(worker for worker in self._workers.values() if start in worker.starts)
        decode = self._workers[start.ticket.decode_worker_id]
        await self._pause()
        if self._happens(0.05, "hand-off"):
            prefill.failed(key, attempt=attempt)
            return
        prefill.token(key, 0, attempt=attempt)
        try:
            for index in range(max(0, len(start.output_token_ids) - 1), NUM_TOKENS):
                await self._pause()
                if attempt < self._newest_attempt(key):  # fenced off: whatever it says is not heard
                    decode.token(key, index, attempt=attempt, token_id=666, last=True)
                    return
                if self._happens(0.02, "eviction"):
                    decode.evict(key, attempt=attempt)
                    return
                if self._happens(0.01, "lease"):
                    decode.failed(key, attempt=attempt, kind=FailureKind.LEASE_EXPIRED)
                    return
                decode.token(key, index, attempt=attempt, last=index == NUM_TOKENS - 1)
                decode.say(make_status())
                if decode in self._workers.values():
                    self._decoding.setdefault((decode, key), len(decode.renewals))
        finally:
            self._decoding.pop((decode, key), None)

    def _newest_attempt(self, key: SequenceKey) -> int:
        return max(seen.attempt for worker in self._all for seen in worker.reserves if seen.key == key)

    def _check_renewal(self, worker: FakeWorker, keys: frozenset[SequenceKey]) -> None:
        now = asyncio.get_running_loop().time()
        for (of, key), since in self._decoding.items():
            is_wanted = key not in self.ended and not worker.releases_of(key)
            if of is worker and is_wanted and len(worker.renewals) > since + 2 and key not in keys:
                self.wrong_renewals.append(f"{key} decodes on {worker.worker_id} but was not named")
        for key in keys:
            if now - self.ended.get(key, now) > 0.5:
                self.wrong_renewals.append(f"{key} has ended but was named to {worker.worker_id}")

    def _happens(self, probability: float, fault: str) -> bool:
        happens = self._chance.random() < probability
        self.num_faults[fault] += happens
        return happens

    async def _pause(self) -> None:
        await asyncio.sleep(self._chance.random() * 0.02)


def _last_attempts(worker: FakeWorker) -> dict[SequenceKey, int]:
    """Of what the worker agreed to: a call that was given up may be released without ever having arrived."""
    attempts: dict[SequenceKey, int] = {}
    for reserve in worker.reserves:
        attempts[reserve.key] = max(attempts.get(reserve.key, 0), reserve.attempt)
    for start in worker.starts:
        attempts[start.key] = max(attempts.get(start.key, 0), start.ticket.attempt)
    return attempts


async def be_a_client(pools: Pools, pair: Pair, name: str, chance: random.Random) -> str:
    """How it went: finished or left."""
    patience = chance.randrange(NUM_TOKENS + 1) if chance.random() < 0.3 else NUM_TOKENS + 1
    received: list[int] = []
    try:
        generation = await pair.generator.start(make_request(name, max_tokens=NUM_TOKENS))
        try:
            if patience == 0:
                return "left"
            async for event in generation:
                received.append(event.token_id)
                if len(received) == patience:
                    return "left"
        finally:
            await generation.aclose()
            assert received == list(range(100, 100 + len(received)))
    finally:
        pools.ended[make_key(name)] = asyncio.get_running_loop().time()
    assert len(received) == NUM_TOKENS
    return "finished"


@pytest.mark.parametrize("is_colocated", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_every_token_comes_once_and_nothing_is_left_behind(seed: int, is_colocated: bool) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    # releases get the time that a busy machine takes, since each must arrive here
    async with open_pair(lease_s=LEASE_S, retry_policy=PATIENT, max_hold_s=0.1, release_timeout_s=5.0) as pair:
        pools = Pools(pair, chance, is_colocated=is_colocated)
        await pools.open()
        # 1. clients come one after the other; some give up while they wait; again and again a worker is in trouble
        clients: list[asyncio.Task[str]] = []
        for number in range(NUM_SEQUENCES):
            clients.append(asyncio.create_task(be_a_client(pools, pair, f"s{number}", random.Random(f"{seed}/{number}"))))
            await asyncio.sleep(chance.random() * 0.02)
            if chance.random() < 0.1:
                chance.choice(clients).cancel()
            if number % 8 == 4 or chance.random() < 0.05:
                await pools.trouble_one()
        # 2. each of them comes to its end, and who stayed has every token
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*clients, return_exceptions=True)
        print(Counter(str(end) or repr(end) for end in ends), pools.num_faults)
        unexpected = [end for end in ends if isinstance(end, Exception)]
        assert unexpected == []
        assert ends.count("finished") > NUM_SEQUENCES // 3
        assert min(pools.num_faults[fault] for fault in ("death", "hand-off", "eviction")) > 0
        # 3. nothing is left, here or on a worker that lives
        async with asyncio.timeout(20):
            await pair.generator.wait_idle()
        pair.assert_no_leaks()
        pools.assert_every_leg_was_released()
        # 4. the leases were those of the sequences at every moment
        await asyncio.sleep(LEASE_S)
        assert pools.wrong_renewals == []
        await pools.close()
