"""One end of the path over torch.distributed in a process of its own, to be killed or stopped: ``python -m … sender|receiver
HOST:PORT``. A receiver serves at a port of its own, which it writes; a sender writes a line when its credits are used up. Then
each waits for its end.
"""

from __future__ import annotations

import asyncio
import sys

from kv_transfer.hold_off import HoldOff
from kv_transfer.torch_distributed_page_service import TorchDistributedPageService
from kv_transfer.torch_distributed_page_transport import TorchDistributedPageTransport
from serving_core.clock import MonotonicClock
from serving_core.rpc.channel import make_server
from tests.contract.page_path import RecordingSink, cut_page, make_ticket

NUM_SLOTS = 4


async def receive(_address: str) -> None:
    """Serves, and never accepts a segment."""
    ticket = make_ticket()
    sink = RecordingSink()
    sink.reserve(ticket)
    sink.gate.clear()
    server = make_server()
    service = TorchDistributedPageService(sink)
    service.add_to_server(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    service.start(address, ticket.decode_incarnation)
    await server.start()
    print(address, flush=True)
    await asyncio.Event().wait()


async def send(address: str) -> None:
    """Uses up its credits, and leaves it so."""
    transport = TorchDistributedPageTransport(
        "127.0.0.1", hold_off=HoldOff(MonotonicClock()), max_unanswered_segments=NUM_SLOTS
    )
    ticket = make_ticket(address=address)
    async with transport.open(ticket) as stream:
        for ordinal in range(NUM_SLOTS):
            await stream.write(next(cut_page(ticket, ordinal)))
        print("full", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run({"receiver": receive, "sender": send}[sys.argv[1]](sys.argv[2]))
