from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from decode_worker.page_sink import DecodePageSink
from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import ReservationId
from serving_core.rpc import convert
from serving_core.rpc.v1 import common_pb2, decode_pb2
from serving_core.transfer_ticket import TransferTicket
from tests.phases import ROUTER, expected_tokens, make_commit, make_request, make_segment, next_token, prompt_segments
from tests.worker_servers import WAIT_S, WorkerServer


def reserve_message(request: GenerateRequest, attempt: int = 1) -> decode_pb2.ReserveRequest:
    return decode_pb2.ReserveRequest(router_id=ROUTER, request=convert.request_to_pb(request), attempt=attempt)


async def reserve(worker: WorkerServer, request: GenerateRequest, attempt: int = 1) -> TransferTicket:
    reply = await worker.decode.Reserve(reserve_message(request, attempt), timeout=WAIT_S)
    assert reply.WhichOneof("answer") == "ticket"
    return convert.ticket_from_pb(reply.ticket)


async def release(worker: WorkerServer, request: GenerateRequest, attempt: int = 1) -> None:
    message = decode_pb2.DecodeReleaseRequest(key=convert.key_to_pb(request.key), attempt=attempt)
    await worker.decode.Release(message, timeout=WAIT_S)


def code_of(reply: decode_pb2.ReserveReply | decode_pb2.CommitReply) -> RefusalCode:
    assert reply.HasField("refusal")
    return convert.refusal_from_pb(reply.refusal).code


async def test_reserve_accept_commit_and_the_stream() -> None:
    async with WorkerServer(is_decode=True) as worker:
        # 1. Reserve.
        request = make_request()
        reply = await worker.decode.Reserve(reserve_message(request), timeout=WAIT_S)
        ticket = convert.ticket_from_pb(reply.ticket)
        assert (ticket.key, ticket.decode_address) == (request.key, worker.address)
        # 2. A commit before the pages.
        commit = decode_pb2.CommitRequest(
            commit=convert.commit_to_pb(make_commit(ticket, next_token(request.prompt_token_ids)))
        )
        assert code_of(await worker.decode.Commit(commit, timeout=WAIT_S)) is RefusalCode.INCOMPLETE
        # 3. Pages, then the commit.
        await DecodePageSink(phase=worker.decode_phase, engine=worker.loop).accept(prompt_segments(ticket, request))
        assert not (await worker.decode.Commit(commit, timeout=WAIT_S)).HasField("refusal")
        # 4. Tokens, and the commit again after the end.
        await worker.sink.wait_until(lambda: len(worker.sink.tokens_of(request.key)) == 5)
        assert [event.token_id for event in worker.sink.tokens_of(request.key)] == expected_tokens(request.prompt_token_ids, 5)
        assert not (await worker.decode.Commit(commit, timeout=WAIT_S)).HasField("refusal")


async def test_the_page_sink_passes_refusals_on() -> None:
    async with WorkerServer(is_decode=True) as worker:
        request = make_request()
        ticket = await reserve(worker, request)
        await release(worker, request)
        with pytest.raises(Refused) as refused:
            await DecodePageSink(phase=worker.decode_phase, engine=worker.loop).accept([make_segment(ticket, 0, b"12")])
        assert refused.value.code is RefusalCode.UNKNOWN_RESERVATION


async def test_refusals_name_their_code() -> None:
    async with WorkerServer(is_decode=True, num_pages=4) as worker:
        reply = await worker.decode.Reserve(reserve_message(make_request(30)), timeout=WAIT_S)
        assert code_of(reply) is RefusalCode.TOO_LARGE
        reply = await worker.decode.Reserve(reserve_message(make_request(), attempt=0), timeout=WAIT_S)
        assert code_of(reply) is RefusalCode.MALFORMED


async def test_messages_that_break_their_format_are_refused_and_harmless() -> None:
    async with WorkerServer(is_decode=True) as worker:
        assert code_of(await worker.decode.Reserve(decode_pb2.ReserveRequest(), timeout=WAIT_S)) is RefusalCode.MALFORMED
        without_router = decode_pb2.ReserveRequest(request=convert.request_to_pb(make_request()), attempt=1)
        assert code_of(await worker.decode.Reserve(without_router, timeout=WAIT_S)) is RefusalCode.MALFORMED
        assert code_of(await worker.decode.Commit(decode_pb2.CommitRequest(), timeout=WAIT_S)) is RefusalCode.MALFORMED
        await worker.decode.Release(decode_pb2.DecodeReleaseRequest(), timeout=WAIT_S)


async def test_unknown_ids_are_a_no_op() -> None:
    async with WorkerServer(is_decode=True) as worker:
        await release(worker, make_request(name="unknown"), 5)
        ticket = await reserve(worker, make_request())
        commit = convert.commit_to_pb(make_commit(ticket, 1))
        commit.reservation_id = ReservationId("f" * 32)
        reply = await worker.decode.Commit(decode_pb2.CommitRequest(commit=commit), timeout=WAIT_S)
        assert code_of(reply) is RefusalCode.UNKNOWN_RESERVATION
        assert reply.refusal.code == common_pb2.REFUSAL_CODE_UNKNOWN_RESERVATION
        await release(worker, make_request())


async def test_a_reserve_waits_its_turn_and_is_answered_later() -> None:
    async with WorkerServer(is_decode=True, num_pages=3) as worker:
        await reserve(worker, make_request(name="a"))
        waiting = asyncio.create_task(reserve(worker, make_request(name="b")))
        second = make_request(name="b")
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        await release(worker, make_request(name="a"))
        assert (await waiting).key == second.key
        await release(worker, second)


async def test_a_cancelled_reserve_is_withdrawn() -> None:
    async with WorkerServer(is_decode=True, num_pages=3) as worker:
        await reserve(worker, make_request(name="a"))
        # 1. The caller's deadline passes while it waits.
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await worker.decode.Reserve(reserve_message(make_request(name="b")), timeout=0.1)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        # 2. When pages come free they go to whoever asks next.
        await release(worker, make_request(name="a"))
        ticket = await reserve(worker, make_request(name="c"))
        assert ticket.key == make_request(name="c").key
        await release(worker, make_request(name="c"))
        assert await worker.num_free_pages() == 3


async def test_a_reserve_without_a_deadline_does_not_wait_for_ever() -> None:
    async with WorkerServer(is_decode=True, num_pages=3, max_wait_s=0.1) as worker:
        await reserve(worker, make_request(name="a"))
        reply = await worker.decode.Reserve(reserve_message(make_request(name="b")))
        assert code_of(reply) is RefusalCode.RESOURCE_EXHAUSTED
        await release(worker, make_request(name="a"))
        assert await worker.num_free_pages() == 3


async def test_nobody_renews_and_all_is_released() -> None:
    async with WorkerServer(is_decode=True, lease_s=0.1) as worker:
        request = make_request()
        await reserve(worker, request)
        await worker.sink.wait_until(lambda: len(worker.sink.failures) == 1)
        assert await worker.num_free_pages() == 16
