"""Workers and routers that die or freeze, with requests under way."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import pytest

from serving_core.page_state import PageState
from tests.e2e.conftest import LEASE_S
from tests.e2e.server_process import ServerProcess, is_pool_at_rest, read_pages, until
from tests.e2e.streams import Stream, completion_body, http_client, run_stream

pytestmark = pytest.mark.e2e

NUM_STREAMS = 8
END_TIMEOUT_S = 5.0
RECOVERY_TIMEOUT_S = 30.0


async def start_streams(client: httpx.AsyncClient, num_tokens: int) -> tuple[list[Stream], list[asyncio.Task[Stream]]]:
    """Streams that have all begun to speak."""
    streams = [Stream() for _ in range(NUM_STREAMS)]
    tasks = [
        asyncio.create_task(run_stream(client, stream, f"Story {i}:", max_tokens=num_tokens, ignore_eos=True))
        for i, stream in enumerate(streams)
    ]
    async with asyncio.timeout(60):
        await asyncio.gather(*(stream.began.wait() for stream in streams))
    return streams, tasks


async def assert_next_request_succeeds(client: httpx.AsyncClient) -> None:
    began = time.monotonic()
    answer = await client.post("/v1/completions", json=completion_body("Hello", max_tokens=4), timeout=RECOVERY_TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    print(f"the next request was answered after {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("worker_id", ["decode-0", "prefill-0"])
async def test_kill_9_of_a_worker(server: ServerProcess, worker_id: str) -> None:
    # a killed prefill worker does not touch what decodes already, so those streams must be able to end in time
    num_tokens = 400 if worker_id == "decode-0" else 24
    before = server.workers()[worker_id]
    async with http_client(server.url) as client:
        # 1. eight streams are running
        streams, tasks = await start_streams(client, num_tokens)
        # 2. the worker dies
        server.signal_worker(worker_id, signal.SIGKILL)
        _, pending = await asyncio.wait(tasks, timeout=END_TIMEOUT_S)
        assert not pending, f"{len(pending)} streams hang"
        # 3. each has ended, by an error event or as it should
        for stream in streams:
            assert (stream.error is None) != (stream.finish_reason is None)
        if worker_id == "decode-0":
            assert all(stream.error is not None for stream in streams)
        # 4. the next request waits for the new worker
        await assert_next_request_succeeds(client)
    after = server.workers()[worker_id]
    assert after["state"] == "ready"
    assert after["incarnation"] != before["incarnation"]
    assert after["pid"] != before["pid"]


async def test_a_prefill_worker_frozen_while_it_pushes(server: ServerProcess) -> None:
    address = server.workers()["decode-0"]["address"]
    pid = server.workers()["prefill-0"]["pid"]
    refused = server.metric("twinpool:kv_writes_refused_total")

    async with http_client(server.url) as client:
        # 1. a long prompt, whose first pages arrive while the next are computed
        stream = Stream()
        task = asyncio.create_task(run_stream(client, stream, "word " * 900, max_tokens=8, ignore_eos=True))
        await until(lambda: read_pages(address).counts[PageState.FILLING] > 0, 30, "the first pages to arrive")
        # 2. frozen for 20 s, well beyond its lease
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: server.workers()["prefill-0"]["state"] != "ready", 10, "the router to notice")
            await until(lambda: is_pool_at_rest(read_pages(address)), 2 * LEASE_S + 2, "decode to free the pages")
            await asyncio.sleep(20)
        finally:
            os.kill(pid, signal.SIGCONT)
        # 3. its late writes are refused and counted
        await until(
            lambda: server.metric("twinpool:kv_writes_refused_total") > refused, 15, "a late write to be refused and counted"
        )
        # 4. the client was told, or served after all
        async with asyncio.timeout(30):
            await task
        assert (stream.error is None) != (stream.finish_reason is None)
        await assert_next_request_succeeds(client)


async def test_a_frozen_router(server: ServerProcess) -> None:
    addresses = [worker["address"] for worker in server.workers().values()]
    async with http_client(server.url) as client:
        # 1. eight streams hold pages
        _, tasks = await start_streams(client, 900)
        assert not all(is_pool_at_rest(read_pages(address)) for address in addresses)
        # 2. the router freezes; its workers release everything within two leases
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            for address in addresses:
                await until(
                    lambda address=address: is_pool_at_rest(read_pages(address)),  # type: ignore[misc]
                    2 * LEASE_S,
                    f"the worker at {address} to release everything",
                )
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        # 3. it wakes: every client is told, and the workers come back to it
        async with asyncio.timeout(RECOVERY_TIMEOUT_S):
            ended = await asyncio.gather(*tasks)
        assert all(stream.error is not None for stream in ended)
        await assert_next_request_succeeds(client)
