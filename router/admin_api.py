"""``/admin/workers`` and ``/admin/pages``: the directory and the live page pools as JSON."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from router.worker_directory import WorkerDirectory, WorkerEntry, WorkerState
from serving_core.clock import Clock
from serving_core.errors import Refused, WorkerLost
from serving_core.page_state import PageRecord, PagesSnapshot, PageState

PAGES_TIMEOUT_S = 5.0
"""A worker shows its pages between two engine steps; one whose step takes longer is listed without them."""

_Json = dict[str, Any]


def make_admin_routes(*, directory: WorkerDirectory, clock: Clock, pages_timeout_s: float = PAGES_TIMEOUT_S) -> APIRouter:
    """The two routes. Who may ask is the application's business."""
    routes = APIRouter(prefix="/admin")

    @routes.get("/workers")
    async def workers() -> JSONResponse:
        now = clock.now()
        return JSONResponse({"workers": [_worker_json(entry, directory.state_of(entry), now) for entry in directory.entries()]})

    @routes.get("/pages")
    async def pages(summary: bool = False) -> JSONResponse:
        entries = directory.entries()
        reads = [_read_pages(entry, directory.state_of(entry), summary, pages_timeout_s) for entry in entries]
        snapshots = await asyncio.gather(*reads)
        return JSONResponse({"workers": [_pages_json(*pair) for pair in zip(entries, snapshots, strict=True)]})

    return routes


def _worker_json(entry: WorkerEntry, state: WorkerState, now: float) -> _Json:
    worker = entry.worker
    hello = worker.hello if worker else None
    status = worker.status if worker else None
    return {
        "id": entry.worker_id,
        "role": entry.role.value,
        "state": state.value,
        "pid": hello.pids[0] if hello and hello.pids else None,
        "pids": list(hello.pids) if hello else [],
        "node": hello.node if hello else None,
        "address": hello.address if hello else None,
        "incarnation": hello.incarnation if hello else None,
        "tensor_parallel_size": hello.tensor_parallel_size if hello else None,
        "num_running": status.num_running if status else 0,
        "num_waiting": status.num_waiting if status else 0,
        "uptime_s": round(now - worker.registered_at, 3) if worker else None,
    }


async def _read_pages(entry: WorkerEntry, state: WorkerState, is_summary: bool, timeout_s: float) -> PagesSnapshot | None:
    if entry.worker is None or state in (WorkerState.STARTING, WorkerState.DEAD):
        return None
    try:
        return await entry.worker.calls.pages(is_summary=is_summary, timeout_s=timeout_s)
    except (WorkerLost, Refused):
        return None


def _pages_json(entry: WorkerEntry, snapshot: PagesSnapshot | None) -> _Json:
    if snapshot is None:
        hello = entry.worker.hello if entry.worker else None
        return {
            "id": entry.worker_id,
            "role": entry.role.value,
            "block_size": hello.layout.page_size if hello else None,
            "num_pages": hello.num_pages if hello else None,
            "states": None,
            "sum_ok": None,
            "pages": [],
        }
    return {
        "id": entry.worker_id,
        "role": entry.role.value,
        "block_size": snapshot.page_size,
        "num_pages": snapshot.num_pages,
        "states": {state.value: snapshot.counts[state] for state in PageState},
        "sum_ok": snapshot.is_sum_ok,
        "pages": [_page_json(page) for page in snapshot.pages],
    }


def _page_json(page: PageRecord) -> _Json:
    return {
        "page": page.page_id,
        "generation": page.generation,
        "state": page.state.value,
        "owners": [
            {"request_id": owner.key.request_id, "choice": owner.key.choice_index, "attempt": owner.attempt}
            for owner in page.owners
        ],
        "age_s": round(page.age_s, 3),
    }
