"""Measures how fast a prompt's pages go from one pool to another when the two ends lay them out differently.

Both ends are in one process: the sender is the product's hand-off, the receiver keeps the product's ledger and copies into a
paged cache, as a decode worker does. An arm's figure is bytes of the receiver's pages a second, from the first page offered to
the acknowledged commit; the arms are gone through in turn. Pages are those of a model with 30 layers and 3 key-value heads of
64 bfloat16 numbers.

    python -m benchmarks.page_layouts
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.engines.machine import commit, processor
from kv_transfer.grpc_page_service import GrpcPageService
from kv_transfer.grpc_page_transport import GrpcPageTransport
from kv_transfer.loopback_transport import LoopbackTransport
from kv_transfer.outgoing_handoff import OutgoingHandoff
from kv_transfer.page_transport import PageTransport, Segment
from kv_transfer.receive_ledger import ReceiveLedger
from kv_transfer.transfer_plan import TransferPlan
from llm_engine.kv_cache import KVCache
from serving_core.clock import MonotonicClock
from serving_core.ids import Incarnation, PageId, RequestId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.rpc.channel import make_server
from serving_core.transfer_ticket import HandoffCommit, TransferTicket

NUM_TOKENS = 1024
MODEL = KVPageLayout(num_layers=30, num_kv_heads=3, head_dim=64, page_size=16, dtype=KVDType.BFLOAT16)
DECODE = WorkerId("decode-0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """``source_heads`` are the heads of each sender."""

    name: str
    source_size: int
    size: int
    source_heads: tuple[range, ...] = (range(3),)
    heads: range = range(3)


ARMS = (
    Arm(name="16 to 16", source_size=16, size=16),
    Arm(name="16 to 32", source_size=16, size=32),
    Arm(name="32 to 16", source_size=32, size=16),
    Arm(name="all 3 heads to a rank with 2", source_size=16, size=16, heads=range(2)),
    Arm(name="ranks with 2 and 1 heads to all 3", source_size=16, size=16, source_heads=(range(2), range(2, 3))),
)


class Receiver:
    """A decode worker's account and cache for one reservation at a time."""

    def __init__(self, layout: KVPageLayout) -> None:
        self._layout = layout
        self._cache = KVCache(layout, layout.num_pages_for(NUM_TOKENS))
        self.reserve()

    def reserve(self) -> None:
        self.ledger = ReceiveLedger(self._layout, 0, self._layout.num_pages_for(NUM_TOKENS))

    async def accept(self, segments: Sequence[Segment]) -> None:
        for segment in self.ledger.add(segments):
            self._cache.write(PageId(segment.page_ordinal), segment.offset, segment.payload, segment.stride)

    async def commit(self, commit: HandoffCommit) -> None:
        """Acknowledges whatever is committed."""


def make_ticket(layout: KVPageLayout, address: str) -> TransferTicket:
    return TransferTicket(
        reservation_id=ReservationId("0" * 32),
        key=SequenceKey(RequestId("benchmark")),
        attempt=1,
        decode_worker_id=DECODE,
        decode_incarnation=Incarnation("benchmark"),
        decode_address=address,
        layout=layout,
        num_prompt_tokens=NUM_TOKENS,
        num_cached_tokens=0,
        lease_s=60.0,
    )


class Track:
    """One arm over one transport, both ends ready."""

    def __init__(self, arm: Arm, transport_name: str) -> None:
        self.arm = arm
        self.transport_name = transport_name
        self.rates: list[float] = []
        layout = replace(MODEL, page_size=arm.size, num_kv_heads=len(arm.heads))
        self._receiver = Receiver(layout)
        self._server = make_server()
        GrpcPageService(self._receiver).add_to_server(self._server)
        self._ticket = make_ticket(layout, f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}")
        is_grpc = transport_name == "grpc"
        self._transport: PageTransport = GrpcPageTransport() if is_grpc else LoopbackTransport({DECODE: self._receiver})
        self._caches = {}
        for heads in arm.source_heads:
            source = replace(MODEL, page_size=arm.source_size, num_kv_heads=len(heads))
            self._caches[heads] = KVCache(source, source.num_pages_for(NUM_TOKENS))

    async def start(self) -> None:
        await self._server.start()

    async def run(self) -> None:
        """One round: every source's whole hand-off, side by side."""
        self._receiver.reserve()
        started_at = time.perf_counter()
        await asyncio.gather(*(self._send(heads, cache) for heads, cache in self._caches.items()))
        assert self._receiver.ledger.is_complete
        self.rates.append(self._receiver.ledger.num_bytes_expected / (time.perf_counter() - started_at))

    async def _send(self, heads: range, cache: KVCache) -> None:
        handoff = OutgoingHandoff(
            ticket=self._ticket,
            plan=TransferPlan.between_heads(cache.layout, heads, self._ticket.layout, self.arm.heads),
            source=cache,
            transport=self._transport,
            committer=self._receiver,
            clock=MonotonicClock(),
        )
        handoff.offer([(number, PageId(number)) for number in range(cache.num_pages)])
        handoff.finish(0, None)
        await handoff.run()

    async def close(self) -> None:
        await self._transport.close()
        await self._server.stop(None)


async def measure(num_rounds: int) -> None:
    """Go through all arms in turn, round after round, and print their medians."""
    tracks = [Track(arm, transport_name) for transport_name in ("loopback", "grpc") for arm in ARMS]
    for track in tracks:
        await track.start()
        await track.run()  # connects, and does not count
        track.rates.clear()
    for _ in range(num_rounds):
        for track in tracks:
            await track.run()
    for track in tracks:
        median, best = statistics.median(track.rates) / 2**20, max(track.rates) / 2**20
        print(f"{track.transport_name:9} {track.arm.name:34} {median:7.0f} MiB/s, best {best:7.0f}")
        await track.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Hand-offs between page layouts that differ.")
    parser.add_argument("--rounds", type=int, default=15)
    flags = parser.parse_args()
    print(f"{commit()} on {processor(os.cpu_count() or 1)}; {NUM_TOKENS} tokens a hand-off, {flags.rounds} rounds")
    asyncio.run(measure(flags.rounds))


if __name__ == "__main__":
    main()
