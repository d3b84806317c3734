"""The choice among page transports: what is taken, said and counted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kv_transfer.fallback_transport import FallbackTransport
from kv_transfer.page_transport import PageStream, Segment
from serving_core.errors import WorkerLost
from serving_core.transfer_ticket import TransferTicket
from tests.contract.page_path import make_ticket

TICKET = make_ticket()


class FakeTransport:
    def __init__(self, name: str, *, is_reachable: bool = True) -> None:
        self.name = name
        self.is_reachable = is_reachable
        self.num_open = 0
        self.is_closed = False

    @asynccontextmanager
    async def open(self, ticket: TransferTicket) -> AsyncIterator[PageStream]:
        if not self.is_reachable:
            raise WorkerLost(f"{ticket.decode_worker_id} is not near {self.name}.")
        self.num_open += 1
        try:
            yield FakeStream()
        finally:
            self.num_open -= 1

    async def close(self) -> None:
        self.is_closed = True


class FakeStream:
    num_accepted = 0

    async def write(self, segment: Segment) -> None:
        raise WorkerLost("It broke.")

    async def flush(self) -> None:
        pass


async def test_the_first_that_reaches_is_taken_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    near, far = FakeTransport("near"), FakeTransport("far")
    transport = FallbackTransport([near, far])
    assert transport.name == "near, far"
    # 1. The best one is there.
    for _ in range(3):
        async with transport.open(TICKET):
            assert (near.num_open, far.num_open) == (1, 0)
    assert near.num_open == 0
    assert [record.message for record in caplog.records] == ["pages to decode-0 go over near. It is the first choice."]
    # 2. It is not any more.
    near.is_reachable = False
    for _ in range(2):
        async with transport.open(TICKET):
            assert (near.num_open, far.num_open) == (0, 1)
    assert [record.message for record in caplog.records[1:]] == ["pages to decode-0 go over far. decode-0 is not near near."]
    # 3. Nor is the other.
    far.is_reachable = False
    for _ in range(2):
        with pytest.raises(WorkerLost, match="not near far"):
            async with transport.open(TICKET):
                pass
    assert [record.levelname for record in caplog.records[2:]] == ["WARNING"]
    assert transport.num_streams == {"near": 3, "far": 2}
    # 4. Closing closes both.
    await transport.close()
    assert near.is_closed
    assert far.is_closed


async def test_why_there_are_no_other_ways_is_said_unless_the_first_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    near, far = FakeTransport("near"), FakeTransport("far")
    transport = FallbackTransport([near, far], left_out="There is no bridge.")
    for near.is_reachable in (True, False):
        async with transport.open(TICKET):
            pass
    assert [record.message for record in caplog.records] == [
        "pages to decode-0 go over near. It is the first choice.",
        "pages to decode-0 go over far. decode-0 is not near near. There is no bridge.",
    ]


async def test_what_breaks_after_opening_is_not_tried_elsewhere() -> None:
    near, far = FakeTransport("near"), FakeTransport("far")
    segment = Segment(
        reservation_id=TICKET.reservation_id, attempt=1, page_ordinal=0, offset=0, payload=memoryview(b"page bytes")
    )
    with pytest.raises(WorkerLost, match="It broke"):
        async with FallbackTransport([near, far]).open(TICKET) as stream:
            await stream.write(segment)
    assert (near.num_open, far.num_open) == (0, 0)
