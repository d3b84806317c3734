"""Measures how fast pages go from one process's pool to another's, over each page transport and beside a plain copy.

Two processes on one machine, as two workers are: the sender writes segments of a hand-off's size out of its pool, the receiver
checks them and copies them into pages of its own. Both pools are larger than the caches and gone through in turn. A transfer
is one attempt: from opening the stream until everything is accepted. ``memcpy`` is one copy within one process, between such
pools, with nothing checked.

    .venv/bin/python -m benchmarks.page_transports                 # prints the table
    .venv/bin/python -m benchmarks.page_transports --rounds 1 --sizes 8
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import google_crc32c
import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.engines.machine import commit, processor
from kv_transfer.grpc_page_service import GrpcPageService
from kv_transfer.grpc_page_transport import GrpcPageTransport
from kv_transfer.outgoing_handoff import MAX_SEGMENT_BYTES
from kv_transfer.page_transport import PageTransport, Segment
from kv_transfer.shared_memory_page_service import SharedMemoryPageService
from kv_transfer.shared_memory_page_transport import SharedMemoryPageTransport
from serving_core.ids import Incarnation, RequestId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.rpc.channel import make_server
from serving_core.transfer_ticket import TransferTicket

POOL_BYTES = 256 << 20
MIN_BYTES_PER_ROUND = 256 << 20
"""Of each arm and size, so that a round is long beside the clock's and the scheduler's grain."""
INCARNATION = Incarnation("benchmark")
RESERVATION = ReservationId("00" * 16)


class CopyingSink:
    """Copies each segment to the next place of a pool, and keeps no account."""

    def __init__(self) -> None:
        self._pool = new_pool()
        self._at = 0

    async def accept(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            num_bytes = segment.payload.nbytes
            np.copyto(self._pool[self._at : self._at + num_bytes], np.frombuffer(segment.payload, dtype=np.uint8))
            self._at = (self._at + num_bytes) % POOL_BYTES


def new_pool() -> npt.NDArray[np.uint8]:
    """Every byte of it written once, so that all of it is there."""
    return np.resize(np.arange(251, dtype=np.uint8), POOL_BYTES)


def receive(ready: Connection) -> None:
    """The receiving process: serves both page paths until it is ended."""
    asyncio.run(_receive(ready))


async def _receive(ready: Connection) -> None:
    sink = CopyingSink()
    server = make_server()
    GrpcPageService(sink).add_to_server(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    SharedMemoryPageService(sink).start(address, INCARNATION)
    ready.send(address)
    await asyncio.Event().wait()


class Sender:
    """The measuring process's end; ``send`` is one transfer."""

    def __init__(self, transport: PageTransport, address: str, pool: npt.NDArray[np.uint8]) -> None:
        self._transport = transport
        self._address = address
        self._pool = pool.data
        self._at = 0

    async def send(self, num_bytes: int) -> None:
        async with self._transport.open(make_ticket(self._address)) as stream:
            for offset in range(0, num_bytes, MAX_SEGMENT_BYTES):
                payload = self._pool[self._at : self._at + MAX_SEGMENT_BYTES]
                self._at = (self._at + MAX_SEGMENT_BYTES) % POOL_BYTES
                await stream.write(
                    Segment(reservation_id=RESERVATION, attempt=1, page_ordinal=0, offset=offset, payload=payload)
                )
            await stream.flush()


class Copier:
    """The arm without a transport."""

    def __init__(self, pool: npt.NDArray[np.uint8]) -> None:
        self._source = pool
        self._destination = new_pool()
        self._at = 0

    async def send(self, num_bytes: int) -> None:
        np.copyto(self._destination[self._at : self._at + num_bytes], self._source[self._at : self._at + num_bytes])
        self._at = (self._at + num_bytes) % POOL_BYTES


def make_ticket(address: str) -> TransferTicket:
    return TransferTicket(
        reservation_id=RESERVATION,
        key=SequenceKey(RequestId("benchmark")),
        attempt=1,
        decode_worker_id=WorkerId("decode-0"),
        decode_incarnation=INCARNATION,
        decode_address=address,
        layout=KVPageLayout(num_layers=1, num_kv_heads=1, head_dim=64, page_size=16, dtype=KVDType.FLOAT32),
        num_prompt_tokens=16,
        num_cached_tokens=0,
        lease_s=60.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One round's transfers of one arm and size: bytes a second, and processor seconds a byte at either end."""

    speed: float
    sender_s: float
    receiver_s: float


Turns: TypeAlias = dict[tuple[str, int], list[Turn]]
"""By arm and transfer size, one a round."""


async def _take_turn(arm: Sender | Copier, num_bytes: int, receiver: psutil.Process) -> Turn:
    num_transfers = MIN_BYTES_PER_ROUND // num_bytes
    total_bytes = num_transfers * num_bytes
    await arm.send(num_bytes)  # connects, and does not count
    sender_s, receiver_s, started_at = time.process_time(), _cpu_s(receiver), time.perf_counter()
    for _ in range(num_transfers):
        await arm.send(num_bytes)
    return Turn(
        speed=total_bytes / (time.perf_counter() - started_at),
        sender_s=(time.process_time() - sender_s) / total_bytes,
        receiver_s=(_cpu_s(receiver) - receiver_s) / total_bytes,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure_all(address: str, receiver: psutil.Process, sizes: Sequence[int], num_rounds: int) -> Turns:
    """Every arm at every size, in turn."""
    pool = new_pool()
    turns: Turns = {}
    async with AsyncExitStack() as stack:
        transports: list[PageTransport] = [SharedMemoryPageTransport(), GrpcPageTransport()]
        arms: dict[str, Sender | Copier] = {"memcpy": Copier(pool)}
        for transport in transports:
            stack.push_async_callback(transport.close)
            arms[transport.name] = Sender(transport, address, pool)
        names = list(arms)
        for number in range(num_rounds):
            for size in sizes:
                for name in (*names[number % len(names) :], *names[: number % len(names)]):
                    turns.setdefault((name, size), []).append(await _take_turn(arms[name], size, receiver))
    return turns


def checksum_speed() -> float:
    """Bytes a second of CRC32C over segments that are in the cache, as they are after a copy."""
    segment = new_pool()[:MAX_SEGMENT_BYTES]
    num_segments = 2000
    started_at = time.perf_counter()
    for _ in range(num_segments):
        google_crc32c.value(segment)
    return num_segments * MAX_SEGMENT_BYTES / (time.perf_counter() - started_at)


def make_table(turns: Turns, sizes: Sequence[int]) -> str:
    """Medians over the rounds, and shares of ``memcpy`` taken within a round."""
    lines = [
        "| MiB | arm | GB/s | range | of memcpy | range | sender ms/GB | receiver ms/GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, size in sorted(turns, key=lambda arm: (sizes.index(arm[1]), arm[0] != "memcpy", arm[0])):
        of_arm = turns[name, size]
        gigabytes = [turn.speed / 1e9 for turn in of_arm]
        shares = [turn.speed / copy.speed for turn, copy in zip(of_arm, turns["memcpy", size], strict=True)]
        sender_ms = statistics.median(turn.sender_s for turn in of_arm) * 1e12
        receiver_ms = statistics.median(turn.receiver_s for turn in of_arm) * 1e12
        lines.append(
            f"| {size >> 20} | {name} | {statistics.median(gigabytes):.2f} | {min(gigabytes):.2f} to {max(gigabytes):.2f} "
            f"| {statistics.median(shares):.0%} | {min(shares):.0%} to {max(shares):.0%} "
            f"| {sender_ms:.0f} | {receiver_ms:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Page transports beside a plain copy.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of every arm (default: %(default)s)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 8, 64], metavar="MIB", help="sizes of a transfer (default: 1 8 64)"
    )
    flags = parser.parse_args()
    sizes = [size << 20 for size in flags.sizes]
    ready, child_ready = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(child_ready,), daemon=True)
    receiver.start()
    try:
        turns = asyncio.run(measure_all(ready.recv(), psutil.Process(receiver.pid), sizes, flags.rounds))
    finally:
        receiver.kill()
        receiver.join()
    print(f"commit {commit()}, {processor(multiprocessing.cpu_count())}\n")
    print(make_table(turns, sizes))
    print(f"\nCRC32C of a segment in the cache: {checksum_speed() / 1e9:.1f} GB/s; each end takes it once.")


if __name__ == "__main__":
    main()
