"""One end of the shared memory path in a process of its own, to be killed: ``python -m … sender|receiver HOST:PORT``.

It writes a line when it has got where the test wants it, and then waits for its end.
"""

from __future__ import annotations

import asyncio
import sys

from kv_transfer.shared_memory_page_service import SharedMemoryPageService
from kv_transfer.shared_memory_page_transport import SharedMemoryPageTransport
from tests.contract.page_path import RecordingSink, cut_page, make_ticket

NUM_SLOTS = 4


async def receive(address: str) -> None:
    """Listens, and never accepts a segment."""
    ticket = make_ticket(address=address)
    sink = RecordingSink()
    sink.reserve(ticket)
    sink.gate.clear()
    SharedMemoryPageService(sink).start(address, ticket.decode_incarnation)
    print("listening", flush=True)
    await asyncio.Event().wait()


async def send(address: str) -> None:
    """Fills every slot of its ring, and leaves it so."""
    transport = SharedMemoryPageTransport(max_unanswered_segments=NUM_SLOTS)
    ticket = make_ticket(address=address)
    async with transport.open(ticket) as stream:
        for ordinal in range(NUM_SLOTS):
            await stream.write(next(cut_page(ticket, ordinal)))
        print("full", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run({"receiver": receive, "sender": send}[sys.argv[1]](sys.argv[2]))
