"""The contract of a page transport, over every back end."""

from __future__ import annotations

import asyncio
import time

import pytest

from kv_transfer.page_transport import PageStream
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.ids import ReservationId
from serving_core.transfer_ticket import TransferTicket
from tests.contract.page_path import (
    LAYOUT,
    MAX_SEGMENT_BYTES,
    PATIENCE_S,
    STALL_TIMEOUT_S,
    PagePath,
    cut_page,
    make_ticket,
    until,
)


async def write_page(
    stream: PageStream, ticket: TransferTicket, ordinal: int, max_segment_bytes: int = MAX_SEGMENT_BYTES
) -> None:
    for segment in cut_page(ticket, ordinal, max_segment_bytes=max_segment_bytes):
        await stream.write(segment)


async def write_and_flush(stream: PageStream, ticket: TransferTicket, *ordinals: int) -> None:
    for ordinal in ordinals:
        await write_page(stream, ticket, ordinal)
    await stream.flush()


async def send(path: PagePath, ticket: TransferTicket, *ordinals: int) -> None:
    """The pages with these ordinals over a stream of their own."""
    async with path.transport.open(ticket) as stream:
        await write_and_flush(stream, ticket, *ordinals)


async def send_all(path: PagePath, ticket: TransferTicket) -> None:
    await send(path, ticket, *range(ticket.first_page, ticket.num_prompt_pages))
    path.sink.assert_pages_equal_source(ticket)


@pytest.mark.parametrize("max_segment_bytes", [MAX_SEGMENT_BYTES, LAYOUT.page_bytes - 1, LAYOUT.page_bytes, 64])
async def test_bytes_arrive_exactly(path: PagePath, max_segment_bytes: int) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    async with path.transport.open(ticket) as stream:
        for ordinal in range(ticket.num_prompt_pages):
            await write_page(stream, ticket, ordinal, max_segment_bytes)
        await stream.flush()
    path.sink.assert_pages_equal_source(ticket)


async def test_pages_may_come_in_any_order_and_skip_what_is_cached(path: PagePath) -> None:
    ticket = make_ticket(address=path.address, num_cached_tokens=LAYOUT.page_size)
    path.sink.reserve(ticket)
    await send(path, ticket, 3, 1, 2)
    path.sink.assert_pages_equal_source(ticket)


async def test_flush_without_a_write_returns(path: PagePath) -> None:
    async with path.transport.open(make_ticket(address=path.address)) as stream:
        await stream.flush()


async def test_a_page_outside_the_reservation_is_refused(path: PagePath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    with pytest.raises(Refused) as refused:
        await send(path, ticket, ticket.num_prompt_pages)
    assert refused.value.code is RefusalCode.MALFORMED
    path.sink.assert_untouched(ticket)


@pytest.mark.parametrize(
    ("sent", "held", "code"),
    [
        (make_ticket(attempt=1), make_ticket(attempt=2), RefusalCode.STALE_ATTEMPT),
        (make_ticket(), make_ticket(reservation_id=ReservationId("ff" * 16)), RefusalCode.UNKNOWN_RESERVATION),
    ],
)
async def test_a_refused_attempt_touches_no_page_and_stays_refused(
    path: PagePath, sent: TransferTicket, held: TransferTicket, code: RefusalCode
) -> None:
    path.sink.reserve(held)
    ticket = make_ticket(attempt=sent.attempt, reservation_id=sent.reservation_id, address=path.address)
    async with path.transport.open(ticket) as stream:
        with pytest.raises(Refused) as refused:
            await write_and_flush(stream, ticket, 0)
        assert refused.value.code is code
        with pytest.raises(Refused) as refused:
            await write_page(stream, ticket, 1)
        assert refused.value.code is code
    path.sink.assert_untouched(held)


async def test_a_refusal_in_one_attempt_leaves_others_alone(path: PagePath) -> None:
    good = make_ticket(address=path.address)
    stale = make_ticket(address=path.address, reservation_id=ReservationId("ab" * 16))
    path.sink.reserve(good)
    async with path.transport.open(good) as stream, path.transport.open(stale) as refused_stream:
        await write_page(stream, good, 0)
        with pytest.raises(Refused):
            await write_and_flush(refused_stream, stale, 0)
        await write_and_flush(stream, good, *range(1, good.num_prompt_pages))
    path.sink.assert_pages_equal_source(good)


async def test_a_broken_way_is_reported_and_segments_sent_again_change_nothing(path: PagePath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    # 1. Two pages are accepted, then the way breaks.
    async with path.transport.open(ticket) as stream:
        await write_and_flush(stream, ticket, 0, 1)
        await path.break_way()
        with pytest.raises(WorkerLost):
            await write_and_flush(stream, ticket, 2)
    num_copies = path.sink.num_copies
    assert path.sink.num_bytes_received(ticket) == 2 * LAYOUT.page_bytes
    # 2. While it is broken, opening again finds nobody.
    with pytest.raises(WorkerLost):
        await send(path, ticket, 0)
    # 3. Mended, everything is sent once more; what was there is not written again.
    await path.mend_way()
    await send_all(path, ticket)
    assert path.sink.num_copies == num_copies * 2


async def test_a_stalled_sink_costs_a_bounded_wait(impatient_path: PagePath) -> None:
    path = impatient_path
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    path.sink.gate.clear()
    started_at = time.monotonic()
    with pytest.raises(WorkerLost):
        await send(path, ticket, *range(ticket.num_prompt_pages))  # more segments than credits
    assert STALL_TIMEOUT_S * 0.9 <= time.monotonic() - started_at < 3 * STALL_TIMEOUT_S
    path.sink.assert_untouched(ticket)


async def test_a_slow_sink_that_goes_on_is_not_stalled(impatient_path: PagePath) -> None:
    path = impatient_path
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)

    async def trickle() -> None:
        while True:
            path.sink.gate.clear()
            await asyncio.sleep(STALL_TIMEOUT_S / 4)
            path.sink.gate.set()
            await asyncio.sleep(0)

    slow = asyncio.create_task(trickle())
    await send_all(path, ticket)
    slow.cancel()


@pytest.mark.parametrize("num_segments", [1, 100])
async def test_cancelling_a_waiting_sender_releases_it_at_once(path: PagePath, num_segments: int) -> None:
    """One segment waits in flush, a hundred wait for a credit."""
    ticket = make_ticket(address=path.address, num_prompt_tokens=100 * LAYOUT.page_size)
    path.sink.reserve(ticket)
    path.sink.gate.clear()

    async def send_segments() -> None:
        async with path.transport.open(ticket) as stream:
            for ordinal in range(num_segments):
                await stream.write(next(cut_page(ticket, ordinal)))
            await stream.flush()

    sender = asyncio.create_task(send_segments())
    await until(lambda: bool(path.sink.batch_sizes))
    started_at = time.monotonic()
    sender.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sender
    assert time.monotonic() - started_at < PATIENCE_S / 4
    path.sink.assert_untouched(ticket)
    # The way is still good for the next attempt.
    path.sink.gate.set()
    path.sink.reserve(make_ticket(attempt=2))
    await send_all(path, make_ticket(attempt=2, address=path.address))


async def test_leaving_a_stream_half_written_leaves_nothing_behind(path: PagePath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    async with path.transport.open(ticket) as stream:
        await write_page(stream, ticket, 0)
    await send_all(path, ticket)


async def test_closing_twice_is_harmless(path: PagePath) -> None:
    ticket = make_ticket(address=path.address)
    path.sink.reserve(ticket)
    await send_all(path, ticket)
    await path.transport.close()
    await path.transport.close()


async def test_many_attempts_at_once(path: PagePath) -> None:
    tickets = [make_ticket(address=path.address, reservation_id=ReservationId(f"{number:032x}")) for number in range(12)]
    for ticket in tickets:
        path.sink.reserve(ticket)
    await asyncio.gather(*(send_all(path, ticket) for ticket in tickets))
