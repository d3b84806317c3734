"""The router as a whole: HTTP in front, scripted workers behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from router.chat_template import read_chat_template
from router.router import Router
from serving_core.errors import ConfigError
from serving_core.ids import SequenceKey, WorkerId
from serving_core.worker_status import PhaseName, Role
from tests.unit.router.default_model import default_model_path, default_tokenizer
from tests.unit.router.fake_worker import FakeWorker

_OWN_LABELS = '{model_name="tiny",role="router",worker="router"}'


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router(
        model_name="tiny",
        tokenizer=default_tokenizer(),
        chat_template=read_chat_template(default_model_path()),
        max_model_len=64,
        lease_s=0.3,
        worker_wait_s=5.0,
    )
    yield router
    async with asyncio.timeout(5):
        await router.stop()
        await router.stop()


@pytest.fixture
async def http(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(router.app), base_url="http://router") as client:
        yield client


async def begun(worker: FakeWorker) -> SequenceKey:
    await worker.saw(lambda worker: len(worker.starts) == 1)
    return worker.starts[0].key


async def first_token_out(http: httpx.AsyncClient) -> None:
    """One token has gone to a client, so that its sequence is under way on both sides of the router."""
    async with asyncio.timeout(5):
        line = "time_to_first_token_seconds_count" + _OWN_LABELS + " 1.0"
        while line not in (await http.get("/metrics")).text:  # noqa: ASYNC110 - a page of metrics has nothing to wait on
            await asyncio.sleep(0.01)


async def test_a_request_from_http_to_workers_and_back(router: Router, http: httpx.AsyncClient) -> None:
    # 1. the router is up before its workers, and shows whom it expects
    address = await router.start_link()
    router.expect(WorkerId("prefill-0"), Role.PREFILL)
    assert (await http.get("/admin/workers")).json()["workers"][0]["state"] == "starting"
    asking = asyncio.create_task(http.post("/v1/completions", json={"model": "tiny", "prompt": "Hello", "max_tokens": 3}))
    # 2. the workers come, and the request that waited is taken
    prefill = await FakeWorker("prefill-0", PhaseName.PREFILL).join(address)
    decode = await FakeWorker("decode-0", PhaseName.DECODE).join(address)
    async with asyncio.timeout(5):
        await router.wait_ready()
    key = await begun(prefill)
    # 3. tokens
    prefill.token(key, 0)
    for index in range(3):
        decode.token(key, index, last=index == 2)
    response = await asyncio.wait_for(asking, 5)
    assert response.status_code == 200, response.text
    assert response.headers["x-twinpool-path"] == "pair"
    assert response.headers["x-twinpool-reason"] == "two_pools"
    assert response.json()["usage"]["completion_tokens"] == 3
    # 4. everything is released and counted
    async with asyncio.timeout(5):
        await router.wait_idle()
    assert len(prefill.releases) == len(decode.releases) == 1
    metrics = (await http.get("/metrics")).text
    assert (
        'twinpool:request_success_total{finished_reason="length",model_name="tiny",role="router",worker="router"} 1.0'
        in metrics
    )
    assert 'path="pair",reason="two_pools",role="router",worker="router"} 1.0' in metrics
    await prefill.die()
    await decode.die()


async def test_drain_and_stop(router: Router, http: httpx.AsyncClient) -> None:
    address = await router.start_link()
    worker = await FakeWorker("both-0", PhaseName.PREFILL, PhaseName.DECODE).join(address)
    await router.wait_ready()
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 3}
    asking = asyncio.create_task(http.post("/v1/completions", json=body))
    key = await begun(worker)
    worker.token(key, 0)
    await first_token_out(http)
    assert (await http.get("/ready")).status_code == 200
    # 1. drained: new requests get 503 with Retry-After, this one goes on
    router.begin_drain()
    ready = await http.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {"missing": ["a router that takes new requests: this one is draining"]}
    assert (await http.get("/health")).status_code == 200
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert not asking.done()
    # 2. stopped: it gets an error, the worker is released, its link ends
    await router.stop()
    assert (await asking).status_code == 502
    assert {(release.phase, release.key) for release in worker.releases} == {
        (PhaseName.PREFILL, key),
        (PhaseName.DECODE, key),
    }
    await worker.link_ended()
    await worker.die()


async def test_a_place_in_the_pools_that_cannot_be_filled(router: Router, http: httpx.AsyncClient) -> None:
    router.expect(WorkerId("decode-0"), Role.DECODE)
    router.mark_dead(WorkerId("decode-0"))
    assert (await http.get("/admin/workers")).json()["workers"][0]["state"] == "dead"
    router.expect(WorkerId("decode-0"), Role.DECODE)
    assert (await http.get("/admin/workers")).json()["workers"][0]["state"] == "starting"


async def test_link_address_in_use(router: Router) -> None:
    address = await router.start_link()
    other = Router(model_name="tiny", tokenizer=default_tokenizer(), chat_template=read_chat_template(default_model_path()))
    host, _, port = address.partition(":")
    with pytest.raises(ConfigError, match=f"cannot listen for workers on {address}"):
        await other.start_link(host, int(port))
    await other.stop()
