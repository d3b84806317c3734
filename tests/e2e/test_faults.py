"""Workers and routers that die or freeze, with requests under way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from serving_core.page_state import PageState
from tests.e2e.conftest import LEASE_S, SERVER_FLAGS
from tests.e2e.server_process import ServerProcess, is_pool_at_rest, read_pages, serving, until
from tests.e2e.streams import Stream, completion_body, http_client, run_stream

pytestmark = pytest.mark.e2e

NUM_STREAMS = 8
NUM_TOKENS = 60
LONG_PROMPT = "word " * 900
RECOVERY_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0
"""A client knows after so long how its stream ends, where another worker takes it over or nobody may wait for one."""
WORKER_WAIT_S = 1.5
FROZEN_S = 20.0


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


async def assert_all_end_in_time(tasks: list[asyncio.Task[Stream]]) -> None:
    killed_at = time.monotonic()
    async with asyncio.timeout(END_TIMEOUT_S):
        await asyncio.gather(*tasks)
    print(f"the streams ended {time.monotonic() - killed_at:.1f} s after the kill")


async def assert_next_request_succeeds(client: httpx.AsyncClient) -> None:
    began = time.monotonic()
    answer = await client.post("/v1/completions", json=completion_body("Hello", max_tokens=4), timeout=RECOVERY_TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    print(f"the next request was answered after {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("worker_id", ["decode-0", "prefill-0"])
async def test_kill_9_of_a_worker(server: ServerProcess, worker_id: str) -> None:
    before = server.workers()[worker_id]
    async with http_client(server.url) as client:
        # 1. eight streams, undisturbed
        _, tasks = await start_streams(client, NUM_TOKENS)
        undisturbed = [(await task).text for task in tasks]
        # 2. the same again; while they run, the worker dies
        streams, tasks = await start_streams(client, NUM_TOKENS)
        server.signal_worker(worker_id, signal.SIGKILL)
        killed_at = time.monotonic()
        async with asyncio.timeout(RECOVERY_TIMEOUT_S):
            await asyncio.gather(*tasks)
        print(f"the streams ended {time.monotonic() - killed_at:.1f} s after the kill")
        # 3. no client noticed more than a pause
        assert [stream.error for stream in streams] == [None] * NUM_STREAMS
        assert [stream.text for stream in streams] == undisturbed
        # 4. the next request is served by the new worker
        await assert_next_request_succeeds(client)
    after = server.workers()[worker_id]
    assert after["state"] == "ready"
    assert after["incarnation"] != before["incarnation"]
    assert after["pid"] != before["pid"]


async def test_kill_9_beside_a_second_worker(tmp_path: Path) -> None:
    flags = (*SERVER_FLAGS, "--prefill-workers", "2", "--decode-workers", "2")
    with serving(tmp_path / "log", *flags) as server:
        async with http_client(server.url) as client:
            _, tasks = await start_streams(client, NUM_TOKENS)
            undisturbed = [(await task).text for task in tasks]
            for victim in ("decode-0", "prefill-0"):
                await until(server.are_all_ready, RECOVERY_TIMEOUT_S, "every worker to be ready")
                streams, tasks = await start_streams(client, NUM_TOKENS)
                server.signal_worker(victim, signal.SIGKILL)
                await assert_all_end_in_time(tasks)
                assert [stream.error for stream in streams] == [None] * NUM_STREAMS, victim
                assert [stream.text for stream in streams] == undisturbed, victim


@pytest.mark.slow
async def test_kill_9_where_nobody_may_wait_for_long(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *SERVER_FLAGS, "--worker-wait", f"{WORKER_WAIT_S:g}") as server:
        for worker_id in ("decode-0", "prefill-0"):
            async with http_client(server.url) as client:
                streams, tasks = await start_streams(client, NUM_TOKENS)
                server.signal_worker(worker_id, signal.SIGKILL)
                await assert_all_end_in_time(tasks)
                endings = [(stream.error or {}).get("code") or stream.finish_reason for stream in streams]
                print(worker_id, endings)
                assert set(endings) <= {"length", "no_capacity"}
                server.wait_ready(RECOVERY_TIMEOUT_S)
                await assert_next_request_succeeds(client)


async def test_a_prefill_worker_frozen_while_it_pushes(server: ServerProcess) -> None:
    address = server.workers()["decode-0"]["address"]
    pid = server.workers()["prefill-0"]["pid"]
    refused = server.metric("twinpool:kv_writes_refused_total")
    async with http_client(server.url) as client:
        # 1. a long prompt, undisturbed and again; its first pages arrive while the next are computed
        undisturbed = await run_stream(client, Stream(), LONG_PROMPT, max_tokens=8, ignore_eos=True)
        stream = Stream()
        computed_anew = run_stream(client, stream, LONG_PROMPT, max_tokens=8, ignore_eos=True, cache_salt="again")
        task = asyncio.create_task(computed_anew)
        await until(lambda: read_pages(address).counts[PageState.FILLING] > 0, 30, "the first pages to arrive")
        # 2. frozen; the router notices, and decode takes the attempt's pages back
        os.kill(pid, signal.SIGSTOP)
        frozen_until = time.monotonic() + FROZEN_S
        try:
            await until(lambda: server.workers()["prefill-0"]["state"] != "ready", 10, "the router to notice")
            await until(lambda: is_pool_at_rest(read_pages(address)), 2 * LEASE_S + 2, "decode to free the pages")
            await asyncio.sleep(frozen_until - time.monotonic())
        finally:
            os.kill(pid, signal.SIGCONT)
        # 3. awake, it writes into nothing: its late writes are refused, unless the news of its release comes first
        async with asyncio.timeout(RECOVERY_TIMEOUT_S):
            await task
        print(f"{server.metric('twinpool:kv_writes_refused_total') - refused:.0f} late writes were refused")
        # 4. a new attempt gave the client what it would have got
        assert (stream.error, stream.text) == (None, undisturbed.text)
        await assert_next_request_succeeds(client)


async def test_a_frozen_router(server: ServerProcess) -> None:
    addresses = [worker["address"] for worker in server.workers().values()]
    async with http_client(server.url) as client:
        # 1. eight streams hold pages
        _, tasks = await start_streams(client, 250)
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
        # 3. it wakes, the workers come back to it, and every stream goes on
        async with asyncio.timeout(2 * RECOVERY_TIMEOUT_S):
            ended = await asyncio.gather(*tasks)
        assert [(stream.error, stream.finish_reason) for stream in ended] == [(None, "length")] * NUM_STREAMS
        await assert_next_request_succeeds(client)
