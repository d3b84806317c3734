from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from llm_engine.engine_calls import run_between_steps
from llm_engine.step_plan import StepPlan
from prefill_worker.commit_client import CommitClient
from prefill_worker.handoff import Handoff
from prefill_worker.handoff_counters import DurationHistogram
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RouterId
from serving_core.kv_page_layout import KVDType
from serving_core.rpc import convert
from serving_core.rpc.v1 import decode_pb2, prefill_pb2
from serving_core.token_event import FailureKind
from serving_core.transfer_ticket import TransferTicket
from tests.phases import LAYOUT, ROUTER, expected_tokens, make_commit, make_request
from tests.worker_servers import WAIT_S, WorkerServer


async def reserve(worker: WorkerServer, request: GenerateRequest, attempt: int = 1) -> TransferTicket:
    message = decode_pb2.ReserveRequest(router_id=ROUTER, request=convert.request_to_pb(request), attempt=attempt)
    reply = await worker.decode.Reserve(message, timeout=WAIT_S)
    assert reply.WhichOneof("answer") == "ticket"
    return convert.ticket_from_pb(reply.ticket)


async def start(worker: WorkerServer, request: GenerateRequest, ticket: TransferTicket) -> RefusalCode | None:
    message = prefill_pb2.StartRequest(
        router_id=ROUTER, request=convert.request_to_pb(request), ticket=convert.ticket_to_pb(ticket)
    )
    reply = await worker.prefill.Start(message, timeout=WAIT_S)
    return convert.refusal_from_pb(reply.refusal).code if reply.HasField("refusal") else None


async def release(worker: WorkerServer, request: GenerateRequest, attempt: int = 1) -> None:
    message = prefill_pb2.PrefillReleaseRequest(key=convert.key_to_pb(request.key), attempt=attempt)
    await worker.prefill.Release(message, timeout=WAIT_S)


async def test_a_request_crosses_two_workers_over_sockets() -> None:
    async with WorkerServer(is_prefill=True) as prefill, WorkerServer(is_decode=True) as decode:
        requests = [make_request(number, name=f"r{number}", max_tokens=6) for number in (1, 4, 9, 13)]
        for request in requests:
            ticket = await reserve(decode, request)
            assert await start(prefill, request, ticket) is None
            assert await start(prefill, request, ticket) is None  # repeated: changes nothing
        for request in requests:
            await decode.sink.wait_until(lambda request=request: len(decode.sink.tokens_of(request.key)) == 6)  # type: ignore[misc]
            expected = expected_tokens(request.prompt_token_ids, 6)
            assert [event.token_id for event in decode.sink.tokens_of(request.key)] == expected
            assert [event.token_id for event in prefill.sink.tokens_of(request.key)] == expected[:1]
        await prefill.wait_until_free(16)
        counters = prefill.prefill_service.counters
        assert (counters.num_acknowledged, counters.num_not_acknowledged) == (4, 0)
        assert counters.num_bytes_sent == (1 + 1 + 3 + 4) * LAYOUT.page_bytes
        assert counters.transfer_s.num_observed == counters.exposed_s.num_observed == 4
        assert counters.exposed_s.total_s > 0
        assert prefill.sink.failures == decode.sink.failures == []


async def test_finished_pages_leave_while_the_next_chunk_is_computed() -> None:
    async with WorkerServer(is_prefill=True) as prefill, WorkerServer(is_decode=True) as decode:
        # 1. The third chunk of eight tokens is not done before the decode worker has the four pages of the first two.
        request = make_request(20)
        have_arrived = threading.Event()

        def compute(plan: StepPlan) -> None:
            if plan.rows[0].start_position == 16:
                assert have_arrived.wait(WAIT_S)

        prefill.runner.before_run = compute
        ticket = await reserve(decode, request)
        assert await start(prefill, request, ticket) is None
        async with asyncio.timeout(WAIT_S):
            while await num_bytes_received(decode) < 4 * LAYOUT.page_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # 2. The last page follows with the commit.
        have_arrived.set()
        await decode.sink.wait_until(lambda: len(decode.sink.tokens_of(request.key)) == 5)
        await prefill.wait_until_free(16)
        assert await num_bytes_received(decode) == 5 * LAYOUT.page_bytes
        assert prefill.prefill_service.counters.num_acknowledged == 1


async def num_bytes_received(decode: WorkerServer) -> int:
    return await run_between_steps(decode.loop, lambda: decode.decode_phase.counters.num_kv_bytes)


async def test_the_local_path_needs_no_transport() -> None:
    async with WorkerServer(is_prefill=True, is_decode=True) as worker:
        request = make_request(9)
        ticket = await reserve(worker, request)
        assert await start(worker, request, ticket) is None
        await worker.sink.wait_until(
            lambda: worker.sink.tokens_of(request.key)[-1:] != [] and worker.sink.tokens_of(request.key)[-1].index == 4
        )
        indexes = [event.index for event in worker.sink.tokens_of(request.key)]
        assert sorted(indexes) == [0, 0, 1, 2, 3, 4]  # the early copy and decode's own
        assert worker.decode_phase.counters.num_kv_bytes == 0
        assert worker.prefill_service.counters.num_acknowledged == 0


async def test_refusals_come_back_with_their_code() -> None:
    async with WorkerServer(is_prefill=True, num_pages=2) as prefill, WorkerServer(is_decode=True) as decode:
        request = make_request(9)
        ticket = await reserve(decode, request)
        assert await start(prefill, request, ticket) is RefusalCode.TOO_LARGE
        other_layout = replace(ticket, layout=replace(LAYOUT, dtype=KVDType.BFLOAT16))
        assert await start(prefill, request, other_layout) is RefusalCode.LAYOUT_MISMATCH
        reply = await prefill.prefill.Start(prefill_pb2.StartRequest(), timeout=WAIT_S)
        assert convert.refusal_from_pb(reply.refusal).code is RefusalCode.MALFORMED
        await prefill.prefill.Release(prefill_pb2.PrefillReleaseRequest(), timeout=WAIT_S)
        await release(prefill, make_request(name="unknown"))
        await decode.decode.Release(
            decode_pb2.DecodeReleaseRequest(key=convert.key_to_pb(request.key), attempt=1), timeout=WAIT_S
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("lease_s", lease_s) for lease_s in (math.nan, math.inf, -1.0, 0.0, 1e9)),
        *(("decode_address", address) for address in ("", "unix:", "unix:/tmp/x", "nowhere", "127.0.0.1:0", "127.0.0.1:x")),
        *(("reservation_id", reservation_id) for reservation_id in ("", "r-1", "g" * 32)),
        *(("attempt", 0), ("decode_worker_id", ""), ("decode_incarnation", ""), ("num_prompt_tokens", 2**32 - 1)),
    ],
)
async def test_a_ticket_that_nobody_can_have_issued_is_refused_before_anything_is_done(field: str, value: object) -> None:
    async with WorkerServer(is_prefill=True) as prefill, WorkerServer(is_decode=True) as decode:
        request = make_request(9)
        ticket = convert.ticket_to_pb(await reserve(decode, request))
        setattr(ticket, field, value)
        message = prefill_pb2.StartRequest(router_id=ROUTER, request=convert.request_to_pb(request), ticket=ticket)
        reply = await prefill.prefill.Start(message, timeout=WAIT_S)
        assert convert.refusal_from_pb(reply.refusal).code is RefusalCode.MALFORMED
        assert await prefill.num_free_pages() == 16
        await decode.decode.Release(
            decode_pb2.DecodeReleaseRequest(key=convert.key_to_pb(request.key), attempt=1), timeout=WAIT_S
        )


async def test_a_start_without_a_router_is_refused() -> None:
    async with WorkerServer(is_prefill=True) as prefill, WorkerServer(is_decode=True) as decode:
        request = make_request(9)
        ticket = convert.ticket_to_pb(await reserve(decode, request))
        message = prefill_pb2.StartRequest(request=convert.request_to_pb(request), ticket=ticket)
        reply = await prefill.prefill.Start(message, timeout=WAIT_S)
        assert convert.refusal_from_pb(reply.refusal).code is RefusalCode.MALFORMED
        assert "the router's id is empty" in reply.refusal.message
        await decode.decode.Release(
            decode_pb2.DecodeReleaseRequest(key=convert.key_to_pb(request.key), attempt=1), timeout=WAIT_S
        )


async def test_a_refused_handoff_is_told_and_its_pages_kept_for_the_next_ticket() -> None:
    async with WorkerServer(is_prefill=True) as prefill, WorkerServer(is_decode=True) as decode:
        # 1. The reservation is gone before prefill starts to push.
        request = make_request(9)
        ticket = await reserve(decode, request)
        await decode.decode.Release(
            decode_pb2.DecodeReleaseRequest(key=convert.key_to_pb(request.key), attempt=1), timeout=WAIT_S
        )
        assert await start(prefill, request, ticket) is None
        await prefill.sink.wait_until(lambda: len(prefill.sink.failures) == 1)
        (failure,) = prefill.sink.failures
        assert failure.kind is FailureKind.HANDOFF
        assert "was released by its router" in failure.message
        assert await prefill.num_free_pages() == 13
        # 2. The next attempt sends them without a step for what is computed.
        assert await start(prefill, request, await reserve(decode, request, 2)) is None
        await decode.sink.wait_until(lambda: len(decode.sink.tokens_of(request.key)) == 5)
        await prefill.wait_until_free(16)
        assert prefill.prefill_phase.counters.num_prompt_tokens == 9


async def test_release_ends_a_handoff_whose_decode_worker_is_gone() -> None:
    async with WorkerServer(is_prefill=True) as prefill, WorkerServer(is_decode=True, lease_s=0.2) as decode:
        # 1. The decode worker stops answering after it has reserved.
        request = make_request(9)
        ticket = await reserve(decode, request)
        await decode.stop_server()
        assert await start(prefill, request, ticket) is None
        await prefill.sink.wait_until(lambda: len(prefill.sink.tokens_of(request.key)) == 1)
        assert await prefill.num_free_pages() == 13
        # 2. The router gives the sequence up. Closing the service waits for the hand-off's end.
        await release(prefill, request)
        await prefill.prefill_service.close()
        assert await prefill.num_free_pages() == 16
        assert prefill.prefill_service.counters.num_not_acknowledged == 1
        await decode.sink.wait_until(lambda: len(decode.sink.failures) == 1)


async def test_closing_the_service_ends_what_is_under_way() -> None:
    async with WorkerServer(is_prefill=True) as prefill, WorkerServer(is_decode=True, lease_s=0.2) as decode:
        request = make_request(9)
        ticket = await reserve(decode, request)
        await decode.stop_server()
        assert await start(prefill, request, ticket) is None
        await prefill.prefill_service.close()
        await prefill.prefill_service.close()
        await release(prefill, request)
        assert await prefill.num_free_pages() == 16
        await decode.sink.wait_until(lambda: len(decode.sink.failures) == 1)


async def test_closing_the_service_ends_a_handoff_that_begins_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerServer(is_prefill=True) as prefill, WorkerServer(is_decode=True, lease_s=0.2) as decode:
        # 1. The engine takes its time to admit; nobody would ever acknowledge the hand-off.
        request = make_request(9)
        ticket = await reserve(decode, request)
        await decode.stop_server()
        is_admitting, may_go_on = threading.Event(), threading.Event()
        admit = prefill.prefill_phase.admit

        def admit_slowly(
            request: GenerateRequest, ticket: TransferTicket, router_id: RouterId, handoff: Handoff | None
        ) -> bool:
            is_admitting.set()
            may_go_on.wait(WAIT_S)
            return admit(request, ticket, router_id, handoff)

        monkeypatch.setattr(prefill.prefill_phase, "admit", admit_slowly)
        starting = asyncio.create_task(start(prefill, request, ticket))
        assert await asyncio.to_thread(is_admitting.wait, WAIT_S)
        # 2. The service closes before the engine comes to it.
        closing = asyncio.create_task(prefill.prefill_service.close())
        await asyncio.wait([closing], timeout=0.05)
        may_go_on.set()
        # 3. It still ends, and so does the hand-off.
        async with asyncio.timeout(WAIT_S):
            await closing
            assert await starting is None
        await release(prefill, request)
        assert await prefill.num_free_pages() == 16
        await decode.sink.wait_until(lambda: len(decode.sink.failures) == 1)


async def test_a_commit_without_an_answer_is_a_lost_worker() -> None:
    async with WorkerServer(is_decode=True) as decode:
        request = make_request()
        ticket = await reserve(decode, request)
        client = CommitClient(timeout_s=2.0)
        committer = client.to(ticket)
        # 1. Refused by a living worker,
        with pytest.raises(Refused) as refused:
            await committer.commit(make_commit(ticket, 1))
        assert refused.value.code is RefusalCode.INCOMPLETE
        await decode.decode.Release(
            decode_pb2.DecodeReleaseRequest(key=convert.key_to_pb(request.key), attempt=1), timeout=WAIT_S
        )
        # 2. lost with a dead one,
        await decode.stop_server()
        for _ in range(2):
            with pytest.raises(WorkerLost, match="got no answer"):
                await committer.commit(make_commit(ticket, 1))
        # 3. and after close.
        await client.close()
        await client.close()
        with pytest.raises(WorkerLost, match="is stopping"):
            await committer.commit(make_commit(ticket, 1))


async def test_a_worker_that_is_stopping_says_so_instead_of_failing() -> None:
    async with WorkerServer(is_prefill=True, is_decode=True) as worker:
        request = make_request()
        ticket = await reserve(worker, request)
        await worker.decode.Release(
            decode_pb2.DecodeReleaseRequest(key=convert.key_to_pb(request.key), attempt=1), timeout=WAIT_S
        )
        assert worker.loop.stop(WAIT_S)
        for call in (
            lambda: start(worker, request, ticket),
            lambda: release(worker, request),
            lambda: reserve(worker, request, 2),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call()
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_the_histogram_counts_by_upper_bound() -> None:
    histogram = DurationHistogram(bounds_s=(0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 3.0):
        histogram.observe(seconds)
    assert list(histogram.cumulative()) == [(0.1, 2), (1.0, 3), (float("inf"), 4)]
    assert histogram.total_s == pytest.approx(3.65)
