"""The admin, health and metrics paths over a real directory with scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from router.admin_api import make_admin_routes
from router.health_api import make_health_routes
from router.worker_directory import WorkerState
from serving_core.clock import MonotonicClock
from serving_core.ids import WorkerId
from serving_core.worker_status import PhaseName, Role
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.pair import Pair

STATE_WORDS = {"free", "used", "cached", "reserved", "filling", "sending", "quarantined"}


@pytest.fixture
async def http(pair: Pair) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.include_router(make_admin_routes(directory=pair.directory, clock=MonotonicClock(), pages_timeout_s=0.2))
    app.include_router(make_health_routes(metrics=pair.metrics, what_is_missing=pair.directory.missing_phases))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        yield client


async def by_id(http: httpx.AsyncClient, path: str) -> dict[str, dict[str, Any]]:
    response = await http.get(path)
    assert response.status_code == 200
    return {worker["id"]: worker for worker in response.json()["workers"]}


async def test_workers_in_every_state(pair: Pair, http: httpx.AsyncClient) -> None:
    # 1. expected, and nothing known of it
    pair.directory.expect(WorkerId("decode-0"), Role.DECODE)
    assert await by_id(http, "/admin/workers") == {
        "decode-0": {
            "id": "decode-0",
            "role": "decode",
            "state": "starting",
            "pid": None,
            "pids": [],
            "node": None,
            "address": None,
            "incarnation": None,
            "tensor_parallel_size": None,
            "num_running": 0,
            "num_waiting": 0,
            "uptime_s": None,
        }
    }
    # 2. registered, with a status
    worker = await FakeWorker("decode-0", PhaseName.DECODE).join(pair.address)
    await pair.directory.wait_until(lambda: next(pair.directory.registered()).status is not None)
    shown = (await by_id(http, "/admin/workers"))["decode-0"]
    assert shown.pop("uptime_s") >= 0
    assert shown.pop("address").startswith("127.0.0.1:")
    assert shown == {
        "id": "decode-0",
        "role": "decode",
        "state": "ready",
        "pid": 4711,
        "pids": [4711],
        "node": "here",
        "incarnation": "first",
        "tensor_parallel_size": 1,
        "num_running": 1,
        "num_waiting": 2,
    }
    # 3. gone
    await worker.die()
    await pair.directory.wait_until(lambda: not pair.directory.connected())
    assert (await by_id(http, "/admin/workers"))["decode-0"]["state"] == "suspect"
    pair.directory.mark_dead(WorkerId("decode-0"))
    assert (await by_id(http, "/admin/workers"))["decode-0"]["state"] == "dead"


async def test_pages(pair: Pair, http: httpx.AsyncClient) -> None:
    pair.directory.expect(WorkerId("prefill-0"), Role.PREFILL)
    workers = [await FakeWorker(f"decode-{i}", PhaseName.DECODE).join(pair.address) for i in range(3)]
    _, silent, dead = workers
    silent.answers.clear()
    await dead.die()
    await pair.directory.wait_until(lambda: len(pair.directory.connected()) == 2)
    # 1. every worker is listed; one that lives shows its pool
    shown = await by_id(http, "/admin/pages")
    assert shown["decode-0"] == {
        "id": "decode-0",
        "role": "decode",
        "block_size": 4,
        "num_pages": 16,
        "states": {word: {"free": 15, "used": 1}.get(word, 0) for word in STATE_WORDS},
        "sum_ok": True,
        "pages": [
            {
                "page": 3,
                "generation": 2,
                "state": "used",
                "owners": [{"request_id": "r", "choice": 0, "attempt": 1}],
                "age_s": 0.5,
            }
        ],
    }
    # 2. a silent, a dead and a starting one have no states
    for worker_id in ("decode-1", "decode-2", "prefill-0"):
        assert shown[worker_id]["states"] is None
        assert shown[worker_id]["pages"] == []
    assert shown["decode-1"]["num_pages"] == 16
    # 3. a summary leaves the pages out
    summary = (await by_id(http, "/admin/pages?summary=1"))["decode-0"]
    assert (summary["pages"], summary["states"]["free"]) == ([], 15)
    for worker in workers:
        await worker.die()


async def test_health_ready_and_metrics(pair: Pair, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    response = await http.get("/ready")
    assert (response.status_code, response.json()) == (503, {"missing": ["prefill", "decode"]})
    workers = [await FakeWorker("both-0", PhaseName.PREFILL, PhaseName.DECODE).join(pair.address)]
    await pair.directory.wait_until(lambda: not pair.directory.missing_phases())
    response = await http.get("/ready")
    assert (response.status_code, response.json()) == (200, {"missing": []})
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "twinpool:pd_decision_total{" in response.text
    for worker in workers:
        await worker.die()
    await pair.directory.wait_until(lambda: not pair.directory.connected())
    (entry,) = pair.directory.entries()
    assert pair.directory.state_of(entry) is WorkerState.SUSPECT
    assert (await http.get("/ready")).status_code == 503
