"""The sender of the path over torch.distributed against receivers that break the contract, and its care for pairs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import torch

from kv_transfer.hold_off import HoldOff
from kv_transfer.page_answer import encode_accepted
from kv_transfer.pair_call import METHOD, SERVICE
from kv_transfer.pair_group import PairGroup, Rank
from kv_transfer.pair_handshake import PairHello, PairWelcome
from kv_transfer.pair_thread import PairThread
from kv_transfer.torch_distributed_page_transport import TorchDistributedPageTransport
from serving_core.clock import ManualClock, MonotonicClock
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.ids import ReservationId
from serving_core.rpc.channel import make_server
from tests.contract.page_path import PATIENCE_S, TorchDistributedPath, assert_no_leaks, cut_page, make_ticket, until

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Serve: TypeAlias = Callable[[Context], Awaitable[None]]


@pytest_asyncio.fixture
async def path() -> AsyncIterator[TorchDistributedPath]:
    opened = TorchDistributedPath(PATIENCE_S)
    await opened.mend_way()
    yield opened
    await opened.close()
    await assert_no_leaks()


@asynccontextmanager
async def receiver(serve: Serve | None) -> AsyncIterator[str]:
    """Whoever listens where a decode worker should; None serves nothing. Yields the address for a ticket."""
    server = make_server()
    if serve is not None:

        async def handle(_requests: object, context: Context) -> None:
            await serve(context)

        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(handle)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
    await assert_no_leaks()


@asynccontextmanager
async def meeting(context: Context, *, proof: bytes | None = None) -> AsyncIterator[None]:
    """A pair, once its ends have met, as a receiver makes it; ``proof`` in the place of the right one."""
    message = await context.read()
    assert isinstance(message, bytes)
    thread = PairThread()
    group = PairGroup(
        Rank.RECEIVER,
        device="cpu",
        num_slots=PairHello.decode(message).num_slots,
        connect_timeout_s=PATIENCE_S,
        timeout_s=PATIENCE_S,
    )
    try:
        await thread.call(group.allocate)
        welcome = PairWelcome.draw(await thread.call(lambda: group.listen("127.0.0.1")))
        await context.write(welcome.encode())
        await thread.call(lambda: group.connect("127.0.0.1", welcome.name.hex()))
        await thread.call(lambda: group.prove(proof or welcome.receiver_proof, welcome.sender_proof))
        await context.write(encode_accepted(0))
        yield
    finally:
        await asyncio.shield(thread.end(group.close))


def make_transport(timeout_s: float = PATIENCE_S) -> TorchDistributedPageTransport:
    return TorchDistributedPageTransport(
        "127.0.0.1",
        hold_off=HoldOff(MonotonicClock()),
        max_unanswered_segments=2,
        stall_timeout_s=timeout_s,
        connect_timeout_s=timeout_s,
    )


async def send_to(address: str, timeout_s: float = PATIENCE_S) -> None:
    transport = make_transport(timeout_s)
    ticket = make_ticket(address=address)
    try:
        async with transport.open(ticket) as stream:
            for segment in cut_page(ticket, 0):
                await stream.write(segment)
            await stream.flush()
    finally:
        await transport.close()


@pytest.mark.parametrize("answer", [b"?", b"\x02" * 9, encode_accepted(0), encode_accepted(3), encode_accepted(2**64 - 1)])
async def test_an_answer_that_breaks_the_format_or_claims_too_much_is_refused(answer: bytes) -> None:
    async def serve(context: Context) -> None:
        async with meeting(context):
            await context.write(answer)
            await asyncio.sleep(5)

    async with receiver(serve) as address:
        with pytest.raises(Refused) as refused:
            await send_to(address)
    assert refused.value.code is RefusalCode.MALFORMED


async def test_a_receiver_that_ends_the_pair_is_lost() -> None:
    async def serve(context: Context) -> None:
        async with meeting(context):
            pass

    async with receiver(serve) as address:
        with pytest.raises(WorkerLost):
            await send_to(address)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"?", id="nonsense"),
        pytest.param(encode_accepted(0), id="too early"),
        pytest.param(PairWelcome.draw(1).encode()[:-1], id="short"),
        pytest.param(PairWelcome.draw(1).encode()[:4] + b"\x02" + PairWelcome.draw(1).encode()[5:], id="version"),
        pytest.param(PairWelcome.draw(1).encode(), id="no store"),
    ],
)
async def test_a_welcome_that_leads_nowhere_makes_it_unreachable_in_bounded_time(answer: bytes) -> None:
    async def serve(context: Context) -> None:
        await context.write(answer)
        await asyncio.sleep(5)

    async with receiver(serve) as address:
        started_at = time.monotonic()
        with pytest.raises(WorkerLost, match=r"cannot be reached over torch\.distributed"):
            await send_to(address, timeout_s=0.5)
        assert time.monotonic() - started_at < 3


async def test_a_receiver_that_says_nothing_is_unreachable_in_bounded_time() -> None:
    async def serve(_context: Context) -> None:
        await asyncio.sleep(5)

    async with receiver(serve) as address:
        with pytest.raises(WorkerLost, match=r"no pair came about within 0\.3 s"):
            await send_to(address, timeout_s=0.3)


async def test_somebody_else_at_the_meeting_is_given_nothing() -> None:
    async def serve(context: Context) -> None:
        async with meeting(context, proof=bytes(16)):
            await asyncio.sleep(5)

    async with receiver(serve) as address:
        with pytest.raises(WorkerLost, match="does not know its secret"):
            await send_to(address)


async def test_a_worker_without_this_way_says_so() -> None:
    async with receiver(None) as address:
        with pytest.raises(WorkerLost, match=r"takes no pages over torch\.distributed"):
            await send_to(address)


async def test_an_attempt_takes_the_pair_of_the_one_before(path: TorchDistributedPath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    for ordinal in range(ticket.num_prompt_pages):
        async with path.transport.open(ticket) as stream:
            for segment in cut_page(ticket, ordinal):
                await stream.write(segment)
            await stream.flush()
        assert path.service.num_pairs == 1
    path.sink.assert_pages_equal_source(ticket)


async def test_a_pair_that_broke_while_idle_is_not_taken(path: TorchDistributedPath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    for _ in range(2):
        async with path.transport.open(ticket) as stream:
            await stream.write(next(cut_page(ticket, 0)))
            await stream.flush()
        await path.break_way()
        await path.mend_way()
        await asyncio.sleep(0.1)


async def test_few_pairs_stay_idle_and_none_after_closing(path: TorchDistributedPath) -> None:
    transport = TorchDistributedPageTransport("127.0.0.1", hold_off=HoldOff(MonotonicClock()), max_idle=1)
    tickets = [make_ticket(address=path.address, reservation_id=ReservationId(f"{number:032x}")) for number in range(3)]
    async with transport.open(tickets[0]), transport.open(tickets[1]), transport.open(tickets[2]):
        assert path.service.num_pairs == 3
    await until(lambda: path.service.num_pairs == 1)
    await transport.close()
    await until(lambda: path.service.num_pairs == 0)
    with pytest.raises(WorkerLost, match="stopping"):
        async with transport.open(tickets[0]):
            pass


@pytest.mark.parametrize("num_allocated", [0, 1], ids=["sender", "receiver"])
async def test_a_pair_that_cannot_be_allocated_leaves_the_hand_off_to_another_way(
    path: TorchDistributedPath, monkeypatch: pytest.MonkeyPatch, num_allocated: int
) -> None:
    """As on a GPU whose memory is taken; the sender allocates first."""
    allocated: list[torch.Tensor] = []

    def pin(slots: torch.Tensor) -> torch.Tensor:
        if len(allocated) == num_allocated:
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocated.append(slots)
        return slots

    monkeypatch.setattr(PairGroup, "_is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    with pytest.raises(WorkerLost, match="could not allocate the slots of a pair"):
        async with path.transport.open(make_ticket(address=path.address)):
            pass
    await until(lambda: path.service.num_pairs == 0)


async def test_after_a_failure_the_way_is_held_off_at_once_and_tried_again_later(path: TorchDistributedPath) -> None:
    clock = ManualClock()
    transport = TorchDistributedPageTransport("127.0.0.1", hold_off=HoldOff(clock), stall_timeout_s=0.3)
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    path.sink.gate.clear()

    async def send() -> None:
        async with transport.open(ticket) as stream:
            await stream.write(next(cut_page(ticket, 0)))
            await stream.flush()

    # 1. A stall breaks the pair; until a second has passed there is none.
    with pytest.raises(WorkerLost, match=r"accepted no page bytes for 0\.3 s"):
        await send()
    with pytest.raises(WorkerLost, match="failed just now and is tried again in 1 s"):
        await send()
    clock.advance(1.0)
    path.sink.gate.set()
    # 2. A new pair; a refusal is none of its failures.
    await send()
    path.sink.reserve(make_ticket(attempt=2))
    for _ in range(2):
        with pytest.raises(Refused):
            await send()
    await transport.close()
