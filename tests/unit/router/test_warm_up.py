"""Workers that come cold: warmed before they get a request, again after a restart, and never kept out for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from router.router import Router
from serving_core.errors import RefusalCode
from serving_core.ids import SequenceKey
from serving_core.worker_status import PhaseName
from tests.unit.router.default_model import default_chat_template, default_tokenizer
from tests.unit.router.fake_worker import FakeWorker

PREFILL, DECODE = PhaseName.PREFILL, PhaseName.DECODE
WARM_PROMPTS = ((11, 12, 13, 14, 15), (21, 22, 23))
BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 1}


class Town:
    """A router with warm prompts, its HTTP side, and workers that end with the test."""

    def __init__(self, router: Router, address: str, http: httpx.AsyncClient) -> None:
        self.router = router
        self.http = http
        self._address = address
        self._workers: list[FakeWorker] = []

    async def add(self, worker_id: str, *phases: PhaseName, incarnation: str = "first") -> FakeWorker:
        worker = FakeWorker(worker_id, *phases, incarnation=incarnation)
        self._workers.append(worker)
        return await worker.join(self._address)

    async def state_of(self, worker_id: str) -> str:
        workers = (await self.http.get("/admin/workers")).json()["workers"]
        return next(str(worker["state"]) for worker in workers if worker["id"] == worker_id)

    async def missing(self) -> list[str]:
        return list((await self.http.get("/ready")).json()["missing"])

    async def wait_ready(self) -> None:
        async with asyncio.timeout(5):
            await self.router.wait_ready()

    async def close(self) -> None:
        for worker in self._workers:
            await worker.die()


@pytest.fixture
async def town() -> AsyncIterator[Town]:
    router = Router(
        model_name="tiny",
        tokenizer=default_tokenizer(),
        chat_template=default_chat_template(),
        max_model_len=64,
        lease_s=0.3,
        worker_wait_s=5.0,
        warm_prompts=WARM_PROMPTS,
        draw_jitter=lambda: 0.0,
    )
    address = await router.start_link()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(router.app), base_url="http://router") as http:
        town = Town(router, address, http)
        yield town
        async with asyncio.timeout(5):
            await router.stop()
        await town.close()


def is_warming(key: SequenceKey) -> bool:
    return key.request_id.startswith("warm-")


def has_started(num_times: int) -> Callable[[FakeWorker], bool]:
    return lambda worker: len(worker.starts) == num_times


async def answer(prefill: FakeWorker, decode: FakeWorker, number: int, *, num_tokens: int = 2) -> SequenceKey:
    """Play the ``number``-th prompt that ``prefill`` gets, from its start to its end."""
    await prefill.saw(lambda worker: len(worker.starts) > number)
    key = prefill.starts[number].key
    prefill.token(key, 0, last=num_tokens == 1)
    for index in range(num_tokens if num_tokens > 1 else 0):
        decode.token(key, index, last=index == num_tokens - 1)
    return key


async def warm_both(town: Town) -> tuple[FakeWorker, FakeWorker]:
    """A pair that is ready: prefill gets the prompts, then decode by way of prefill."""
    prefill, decode = await town.add("prefill-0", PREFILL), await town.add("decode-0", DECODE)
    for number in range(4):
        assert is_warming(await answer(prefill, decode, number))
    await town.wait_ready()
    return prefill, decode


async def test_no_request_before_the_warm_prompts(town: Town) -> None:
    # 1. a request waits, and a prefill worker comes: nothing can be sent through it yet
    asking = asyncio.create_task(town.http.post("/v1/completions", json=BODY))
    prefill = await town.add("prefill-0", PREFILL)
    assert await town.missing() == ["prefill", "decode"]
    # 2. with a decode worker beside it, it gets the warm prompts one after another
    decode = await town.add("decode-0", DECODE)
    first = await answer(prefill, decode, 0)
    assert prefill.starts[0].ticket.num_prompt_tokens == len(WARM_PROMPTS[0])
    await prefill.saw(has_started(2))
    assert prefill.starts[1].ticket.num_prompt_tokens == len(WARM_PROMPTS[1])
    assert await town.missing() == ["prefill", "decode"]
    assert await town.state_of("prefill-0") == await town.state_of("decode-0") == "starting"
    # 3. it is warm, and the decode worker gets them by way of it
    second = await answer(prefill, decode, 1)
    await prefill.saw(has_started(3))
    assert await town.missing() == ["decode"]
    third, fourth = await answer(prefill, decode, 2), await answer(prefill, decode, 3)
    assert all(map(is_warming, (first, second, third, fourth)))
    # 4. both are: now the request
    own = await answer(prefill, decode, 4, num_tokens=1)
    assert not is_warming(own)
    assert (await asyncio.wait_for(asking, 5)).status_code == 200
    assert await town.missing() == []
    # 5. every sequence was released on both sides
    async with asyncio.timeout(5):
        await town.router.wait_idle()
    keys = {first, second, third, fourth, own}
    assert {release.key for release in prefill.releases} == {release.key for release in decode.releases} == keys


async def test_a_new_process_is_warmed_while_the_others_serve(town: Town) -> None:
    prefill, decode = await warm_both(town)
    # 1. a second prefill worker gets nothing but the warm prompts
    second = await town.add("prefill-1", PREFILL)
    await second.saw(has_started(1))
    assert is_warming(second.starts[0].key)
    assert await town.missing() == []
    asking = asyncio.create_task(town.http.post("/v1/completions", json=BODY))
    await answer(prefill, decode, 4, num_tokens=1)
    assert (await asyncio.wait_for(asking, 5)).status_code == 200
    assert len(second.starts) == 1
    # 2. the first one is restarted: no prefill worker is warm
    await prefill.die()
    restarted = await town.add("prefill-0", PREFILL, incarnation="second")
    await restarted.saw(has_started(1))
    assert is_warming(restarted.starts[0].key)
    assert await town.missing() == ["prefill"]
    for worker in (second, restarted):
        for number in range(2):
            await answer(worker, decode, number)
    await town.wait_ready()
    async with asyncio.timeout(5):
        while {await town.state_of(worker_id) for worker_id in ("prefill-0", "prefill-1")} != {"ready"}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_process_that_dials_again_still_has_them(town: Town) -> None:
    prefill, _ = await warm_both(town)
    await prefill.hang_up()
    again = await town.add("prefill-0", PREFILL)
    await town.wait_ready()
    assert not again.starts


async def test_both_phases_on_one_worker(town: Town) -> None:
    both = await town.add("both-0", PREFILL, DECODE)
    for number in range(2):
        assert await town.missing() == ["prefill", "decode"]
        assert is_warming(await answer(both, both, number))
    await town.wait_ready()


async def test_a_worker_that_dies_meanwhile_leaves_nothing(town: Town) -> None:
    prefill, decode = await town.add("prefill-0", PREFILL), await town.add("decode-0", DECODE)
    await prefill.saw(has_started(1))
    await prefill.die()
    key = prefill.starts[0].key
    await decode.saw(lambda worker: bool(worker.releases_of(key)))
    assert await town.state_of("decode-0") == "starting"
    restarted = await town.add("prefill-0", PREFILL, incarnation="second")
    for number in range(4):
        await answer(restarted, decode, number)
    await town.wait_ready()


async def test_a_partner_that_dies_meanwhile_is_replaced(town: Town) -> None:
    prefill, decode = await town.add("prefill-0", PREFILL), await town.add("decode-0", DECODE)
    await prefill.saw(has_started(1))
    key = prefill.starts[0].key
    await decode.die()
    restarted = await town.add("decode-0", DECODE, incarnation="second")
    await prefill.saw(has_started(2))
    seen = prefill.starts[1]
    assert (seen.key, seen.ticket.attempt) == (key, 2)
    prefill.token(key, 0, attempt=2)
    for index in range(2):
        restarted.token(key, index, attempt=2, last=index == 1)
    for number in range(2, 5):
        await answer(prefill, restarted, number)
    await town.wait_ready()


async def test_a_worker_that_cannot_be_warmed_serves(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    decode = await town.add("decode-0", DECODE)
    decode.refusals = [RefusalCode.TOO_LARGE] * 2
    prefill = await town.add("prefill-0", PREFILL)
    await town.wait_ready()
    assert [record.args[0] for record in caplog.records if "serves without" in record.msg] == ["prefill-0", "decode-0"]  # type: ignore[index]
    assert not prefill.starts


async def test_a_drain_gives_the_warm_prompts_up(town: Town) -> None:
    prefill, decode = await town.add("prefill-0", PREFILL), await town.add("decode-0", DECODE)
    await prefill.saw(has_started(1))
    town.router.begin_drain()
    async with asyncio.timeout(5):
        await town.router.wait_idle()
    key = prefill.starts[0].key
    assert len(prefill.releases_of(key)) == len(decode.releases_of(key)) == 1
    assert await town.state_of("prefill-0") == await town.state_of("decode-0") == "ready"
