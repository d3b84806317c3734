"""On the gRPC services of workers and router: bytes that are no message, and messages in which anything may stand."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import grpc
import grpc.aio
from google.protobuf.message import Message

from serving_core.ids import ReservationId
from serving_core.rpc import convert
from serving_core.rpc.v1 import common_pb2, decode_pb2, prefill_pb2, router_link_pb2, worker_pb2
from serving_core.token_event import TokenEvent
from serving_core.transfer_ticket import TransferTicket
from tests.fuzz.noise import spoil_bytes, spoil_message
from tests.fuzz.target import STRANGER, Target, commit_of, make_request, reserve_of, write_all

DEADLINE_S = 5.0
ORDERLY_ENDS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""UNKNOWN or INTERNAL would be a method that broke."""


async def bad_call(target: Target, chance: random.Random) -> None:
    """Of a method of any worker, or of one that it does not have."""
    name, message = _draw_message(target, chance)
    payload = _spoilt(chance, message)
    if chance.random() < 0.05:
        name = chance.choice(("/twinpool.v1.Decode/Nothing", "/grpc.health.v1.Health/Check", "/", "/x/" + "y" * 5000))
    address = chance.choice(target.worker_addresses)
    try:
        if chance.random() < 0.05:
            with suppress(TimeoutError):
                async with asyncio.timeout(chance.random() * 0.01):
                    await target.call(address, name, payload, timeout_s=DEADLINE_S)
        else:
            await target.call(address, name, payload, timeout_s=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        if error.code() not in ORDERLY_ENDS:
            raise


async def bad_commit(target: Target, chance: random.Random) -> None:
    """Of a held reservation, whose bytes have not all come: from the attempt that stands, or from another."""
    held = chance.choice(target.held)
    message = commit_of(held.ticket)
    if chance.random() < 0.7:
        spoil_message(chance, message.commit)
    answer = await target.call(held.worker.hello.address, "/twinpool.v1.Decode/Commit", message.SerializeToString())
    reply = decode_pb2.CommitReply.FromString(answer)
    assert reply.HasField("refusal"), f"this was taken: {message}"


async def bad_link(target: Target, chance: random.Random) -> None:
    """A worker that dials the router with another model, or with noise, and then says anything."""
    hello = convert.hello_to_pb(next(iter(target.server.workers.values())).hello)
    hello.worker_id, hello.model_name = f"stranger-{chance.randrange(10**9)}", "another model"
    first = router_link_pb2.WorkerMessage(hello=hello)
    event = convert.event_to_pb(TokenEvent(key=target.held[0].ticket.key, attempt=2, index=0, token_id=5))
    second = router_link_pb2.WorkerMessage(step=router_link_pb2.StepEvents(events=[event]))
    messages = [_spoilt(chance, message) for message in (first, second, second)]
    if chance.random() < 0.3:
        messages = messages[chance.randrange(3) :]
    if chance.random() < 0.1:
        messages[0] = first.SerializeToString()
    call = target.stream(target.link_address, "/twinpool.v1.RouterLink/Connect")
    writing = asyncio.create_task(write_all(call, messages))
    try:
        async with target.being_there(target.link_address), asyncio.timeout(4 * DEADLINE_S):
            while isinstance(raw := await call.read(), bytes):
                answer = router_link_pb2.RouterMessage.FromString(raw)
                assert answer.WhichOneof("message") == "refusal", f"a stranger was let in: {answer}"
    except grpc.aio.AioRpcError as error:
        if error.code() not in ORDERLY_ENDS:
            raise
    finally:
        call.cancel()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


def _spoilt(chance: random.Random, message: Message) -> bytes:
    if chance.random() < 0.4:
        return spoil_bytes(chance, message.SerializeToString() or b"\0")
    spoilt = type(message)()
    spoilt.CopyFrom(message)
    for _ in range(chance.randrange(1, 5)):
        spoil_message(chance, spoilt)
    return spoilt.SerializeToString()


def _draw_message(target: Target, chance: random.Random) -> tuple[str, Message]:
    """A method with what it takes, of a sequence that nobody else has."""
    held = chance.choice(target.held)
    request = make_request(f"stranger-{chance.randrange(10**9)}", chance.choice((1, 16, 40, 300)), first=chance.randrange(256))
    ticket = TransferTicket(
        reservation_id=ReservationId(chance.randbytes(16).hex()),
        key=request.key,
        attempt=1,
        decode_worker_id=held.ticket.decode_worker_id,
        decode_incarnation=held.ticket.decode_incarnation,
        decode_address=held.ticket.decode_address,
        layout=held.ticket.layout,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=0,
        lease_s=2.0,
    )
    key = common_pb2.SequenceKey(request_id=request.key.request_id)
    start = prefill_pb2.StartRequest(
        router_id=STRANGER, request=convert.request_to_pb(request), ticket=convert.ticket_to_pb(ticket)
    )
    return chance.choice(
        (
            ("/twinpool.v1.Decode/Reserve", reserve_of(request, 1)),
            ("/twinpool.v1.Decode/Commit", commit_of(ticket)),
            ("/twinpool.v1.Decode/Release", decode_pb2.DecodeReleaseRequest(key=key, attempt=1)),
            ("/twinpool.v1.Prefill/Start", start),
            ("/twinpool.v1.Prefill/Release", prefill_pb2.PrefillReleaseRequest(key=key, attempt=1)),
            ("/twinpool.v1.Worker/GetPages", worker_pb2.GetPagesRequest(is_summary=True)),
        )
    )
