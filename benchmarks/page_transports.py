"""Measures how fast pages go from one process's pool to another's, over each page transport, beside the library that it uses
alone and beside a plain copy.

Two processes on one machine, as two workers are: the sender writes segments of a hand-off's size out of its pool, the receiver
checks them and copies them into pages of its own. Both pools are larger than the caches and gone through in turn. A transfer
is one attempt: from opening the stream until everything is accepted. ``memcpy`` is one copy within one process, between such
pools, with nothing checked. ``gloo_alone`` sends the same segments out of the pool straight into the other one, as many at a
time as torch_distributed may have under way, with nothing checked or copied besides. ``grpc_alone`` sends them as messages on a
stream of bytes, one stream a transfer and one answer at its end; the receiver drops them.

    .venv/bin/python -m benchmarks.page_transports
    .venv/bin/python -m benchmarks.page_transports --rounds 1 --sizes 8 --results /tmp      # a trial
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import shlex
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import google_crc32c
import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
import psutil
import torch
import torch.distributed

from benchmarks.engines.machine import commit, processor
from benchmarks.engines.spread import Spread
from kv_transfer.grpc_page_service import GrpcPageService
from kv_transfer.grpc_page_transport import GrpcPageTransport
from kv_transfer.hold_off import HoldOff
from kv_transfer.outgoing_handoff import MAX_SEGMENT_BYTES
from kv_transfer.page_transport import PageTransport, Segment
from kv_transfer.shared_memory_page_service import SharedMemoryPageService
from kv_transfer.shared_memory_page_transport import SharedMemoryPageTransport
from kv_transfer.torch_distributed_page_service import TorchDistributedPageService
from kv_transfer.torch_distributed_page_transport import TorchDistributedPageTransport
from serving_core.clock import MonotonicClock
from serving_core.ids import Incarnation, RequestId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.rpc.channel import make_server, open_channel
from serving_core.transfer_ticket import TransferTicket

POOL_BYTES = 256 << 20
MIN_BYTES_PER_ROUND = 256 << 20
"""Of each arm and size, so that a round is long beside the clock's and the scheduler's grain."""
MEMCPY, GLOO_ALONE, GRPC_ALONE = "memcpy", "gloo_alone", "grpc_alone"
LIBRARIES = {GrpcPageTransport.name: GRPC_ALONE, TorchDistributedPageTransport.name: GLOO_ALONE}
"""What each transport is held against, besides a plain copy."""
MIN_OF_LIBRARY, MIN_OF_MEMCPY, MIN_BYTES_OF_TARGET = 0.8, 0.7, 8 << 20
MIN_ROUNDS = 3
INCARNATION = Incarnation("benchmark")
RESERVATION = ReservationId("00" * 16)
NUM_UNDER_WAY = 16
"""Segments, for gloo alone."""
_ALONE = "twinpool.benchmark.GrpcAlone"
_distributed: Any = torch.distributed  # torch's stubs lack much of what its bindings have
GLOO_TIMEOUT = timedelta(hours=1)
"""The receiver waits for the next transfer while others have their turn."""


class CopyingSink:
    """Copies each segment to the next place of a pool, and keeps no account."""

    def __init__(self) -> None:
        self._pool = new_pool()
        self._at = 0

    async def accept(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            num_bytes = segment.payload.nbytes
            np.copyto(self._pool[self._at : self._at + num_bytes], np.frombuffer(segment.payload, dtype=np.uint8))
            self._at = place_behind(self._at, num_bytes)


def place_behind(at: int, num_bytes: int) -> int:
    """Where the next piece of that length lies in a pool."""
    return at + num_bytes if at + 2 * num_bytes <= POOL_BYTES else 0


def new_pool() -> npt.NDArray[np.uint8]:
    """Every byte of it written once, so that all of it is there."""
    return np.resize(np.arange(251, dtype=np.uint8), POOL_BYTES)


def receive(ready: Connection, segment_bytes: int) -> None:
    """The receiving process: serves every page path until it is ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    gloo_port: int = listener.getsockname()[1]
    threading.Thread(target=_serve_gloo, args=(gloo_port, listener.detach(), segment_bytes), daemon=True).start()
    asyncio.run(_receive(ready, gloo_port))


async def _receive(ready: Connection, gloo_port: int) -> None:
    sink = CopyingSink()
    server = make_server()
    GrpcPageService(sink).add_to_server(server)
    pairs = TorchDistributedPageService(sink)
    pairs.add_to_server(server)
    drop: Any = grpc.stream_unary_rpc_method_handler(_drop)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_ALONE, {"Write": drop}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    SharedMemoryPageService(sink).start(address, INCARNATION)
    pairs.start(address, INCARNATION)
    ready.send((address, gloo_port))
    await asyncio.Event().wait()


async def _drop(messages: AsyncIterator[bytes], _context: object) -> bytes:
    async for _ in messages:
        pass
    return b"."


def _serve_gloo(port: int, listener: int, segment_bytes: int) -> None:
    with suppress(RuntimeError):  # the measuring process has left
        _receive_over_gloo(port, listener, segment_bytes)


def _receive_over_gloo(port: int, listener: int, segment_bytes: int) -> None:
    """Transfer after transfer: how many segments, those, and a byte back."""
    group = _gloo_group(port, listener)
    pool = torch.from_numpy(new_pool())
    count, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.uint8)
    at = 0
    while True:
        group.recv([count], 1, 0).wait(GLOO_TIMEOUT)
        works: list[Any] = []
        for _ in range(int(count)):
            works.append(group.recv([pool[at : at + segment_bytes]], 1, 0))
            at = place_behind(at, segment_bytes)
            if len(works) == NUM_UNDER_WAY:
                works.pop(0).wait(GLOO_TIMEOUT)
        for work in works:
            work.wait(GLOO_TIMEOUT)
        group.send([answer], 1, 0).wait(GLOO_TIMEOUT)


def _gloo_group(port: int, listener: int | None) -> Any:
    """With the store's listening socket as rank 0, without as rank 1."""
    store = _distributed.TCPStore(
        "127.0.0.1", port, is_master=listener is not None, wait_for_workers=False, master_listen_fd=listener
    )
    gloo = _distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = GLOO_TIMEOUT
    return gloo(_distributed.PrefixStore("gloo", store), 0 if listener is not None else 1, 2, options)


class Sender:
    """The measuring process's end; ``send`` is one transfer."""

    def __init__(self, transport: PageTransport, address: str, pool: npt.NDArray[np.uint8], segment_bytes: int) -> None:
        self._transport = transport
        self._address = address
        self._pool = pool.data
        self._segment_bytes = segment_bytes
        self._at = 0

    async def send(self, num_segments: int) -> None:
        async with self._transport.open(make_ticket(self._address)) as stream:
            for number in range(num_segments):
                payload = self._pool[self._at : self._at + self._segment_bytes]
                self._at = place_behind(self._at, self._segment_bytes)
                offset = number * self._segment_bytes
                await stream.write(
                    Segment(reservation_id=RESERVATION, attempt=1, page_ordinal=0, offset=offset, payload=payload)
                )
            await stream.flush()


class Copier:
    """The arm without a transport: a transfer is copied in one piece."""

    def __init__(self, pool: npt.NDArray[np.uint8], segment_bytes: int) -> None:
        self._source = pool
        self._destination = new_pool()
        self._segment_bytes = segment_bytes
        self._at = 0

    async def send(self, num_segments: int) -> None:
        num_bytes = num_segments * self._segment_bytes
        np.copyto(self._destination[self._at : self._at + num_bytes], self._source[self._at : self._at + num_bytes])
        self._at = place_behind(self._at, num_bytes)


class GrpcSender:
    """The arm of gRPC alone."""

    def __init__(self, address: str, pool: npt.NDArray[np.uint8], segment_bytes: int) -> None:
        self._channel = open_channel(address)
        self._pool = pool.data
        self._segment_bytes = segment_bytes
        self._at = 0

    async def send(self, num_segments: int) -> None:
        call: grpc.aio.StreamUnaryCall[bytes, bytes] = self._channel.stream_unary(f"/{_ALONE}/Write")()
        for _ in range(num_segments):
            await call.write(bytes(self._pool[self._at : self._at + self._segment_bytes]))  # gRPC takes nothing but bytes
            self._at = place_behind(self._at, self._segment_bytes)
        await call.done_writing()
        await call

    async def close(self) -> None:
        await self._channel.close()


class GlooSender:
    """The arm of gloo alone."""

    def __init__(self, port: int, pool: npt.NDArray[np.uint8], segment_bytes: int) -> None:
        self._group = _gloo_group(port, None)
        self._pool = torch.from_numpy(pool)
        self._segment_bytes = segment_bytes
        self._at = 0

    async def send(self, num_segments: int) -> None:
        await asyncio.to_thread(self._send, num_segments)

    def _send(self, num_segments: int) -> None:
        self._group.send([torch.tensor([num_segments])], 0, 0).wait(GLOO_TIMEOUT)
        works: list[Any] = []
        for _ in range(num_segments):
            works.append(self._group.send([self._pool[self._at : self._at + self._segment_bytes]], 0, 0))
            self._at = place_behind(self._at, self._segment_bytes)
            if len(works) == NUM_UNDER_WAY:
                works.pop(0).wait(GLOO_TIMEOUT)
        for work in works:
            work.wait(GLOO_TIMEOUT)
        self._group.recv([torch.zeros(1, dtype=torch.uint8)], 0, 0).wait(GLOO_TIMEOUT)


Arm: TypeAlias = Sender | Copier | GrpcSender | GlooSender


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


async def _take_turn(arm: Arm, num_segments: int, segment_bytes: int, receiver: psutil.Process) -> Turn:
    num_transfers = -(-MIN_BYTES_PER_ROUND // (num_segments * segment_bytes))
    total_bytes = num_transfers * num_segments * segment_bytes
    await arm.send(num_segments)  # connects, and does not count
    sender_s, receiver_s, started_at = time.process_time(), _cpu_s(receiver), time.perf_counter()
    for _ in range(num_transfers):
        await arm.send(num_segments)
    return Turn(
        speed=total_bytes / (time.perf_counter() - started_at),
        sender_s=(time.process_time() - sender_s) / total_bytes,
        receiver_s=(_cpu_s(receiver) - receiver_s) / total_bytes,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure_all(
    address: str, gloo_port: int, receiver: psutil.Process, *, sizes: Sequence[int], segment_bytes: int, num_rounds: int
) -> Turns:
    """Every arm at every size, in turn."""
    pool = new_pool()
    turns: Turns = {}
    async with AsyncExitStack() as stack:
        transports: list[PageTransport] = [
            SharedMemoryPageTransport(),
            TorchDistributedPageTransport("127.0.0.1", hold_off=HoldOff(MonotonicClock())),
            GrpcPageTransport(),
        ]
        grpc_alone = GrpcSender(address, pool, segment_bytes)
        stack.push_async_callback(grpc_alone.close)
        arms: dict[str, Arm] = {
            MEMCPY: Copier(pool, segment_bytes),
            GLOO_ALONE: GlooSender(gloo_port, pool, segment_bytes),
            GRPC_ALONE: grpc_alone,
        }
        for transport in transports:
            stack.push_async_callback(transport.close)
            arms[transport.name] = Sender(transport, address, pool, segment_bytes)
        names = list(arms)
        for number in range(num_rounds):
            for size in sizes:
                for name in (*names[number % len(names) :], *names[: number % len(names)]):
                    turn = await _take_turn(arms[name], -(-size // segment_bytes), segment_bytes, receiver)
                    turns.setdefault((name, size), []).append(turn)
    return turns


def checksum_speed(segment_bytes: int) -> float:
    """Bytes a second of CRC32C over segments that are in the cache, as they are after a copy."""
    segment = new_pool()[:segment_bytes]
    num_segments = 500
    started_at = time.perf_counter()
    for _ in range(num_segments):
        google_crc32c.value(segment)
    return num_segments * segment_bytes / (time.perf_counter() - started_at)


def make_table(turns: Turns, sizes: Sequence[int]) -> str:
    """Medians over the rounds with their range, and shares taken within a round. A mark says whether a target is met."""
    lines = [
        "| MiB | arm | GB/s | of memcpy | of its library alone | sender ms/GB | receiver ms/GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, size in sorted(turns, key=lambda arm: (sizes.index(arm[1]), arm[0] != MEMCPY, arm[0])):
        of_arm = turns[name, size]
        speed = Spread.of(turn.speed / 1e9 for turn in of_arm)
        assert speed is not None
        is_for_target = name == SharedMemoryPageTransport.name and size >= MIN_BYTES_OF_TARGET
        library = LIBRARIES.get(name)
        cells = [
            str(size >> 20),
            name,
            speed.text(2),
            _share(of_arm, turns[MEMCPY, size], MIN_OF_MEMCPY if is_for_target else None),
            _share(of_arm, turns[library, size], MIN_OF_LIBRARY) if library is not None else "",
            f"{statistics.median(turn.sender_s for turn in of_arm) * 1e12:.0f}",
            f"{statistics.median(turn.receiver_s for turn in of_arm) * 1e12:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(turns: Sequence[Turn], others: Sequence[Turn], target: float | None) -> str:
    share = Spread.of(100 * turn.speed / other.speed for turn, other in zip(turns, others, strict=True))
    assert share is not None
    mark = "" if target is None else f", target {target:.0%} {'✓' if share.median >= 100 * target else '✗'}"
    return f"{share.text()} %{mark}"


def make_report(turns: Turns, sizes: Sequence[int], *, command: str, segment_bytes: int) -> str:
    """Markdown, with a line at its end."""
    num_rounds = len(turns[MEMCPY, sizes[0]])
    lines = [
        "# The page path between two processes",
        "",
        f"- commit: {commit()}",
        f"- machine: {processor(multiprocessing.cpu_count())}",
        f"- command: `{command}`",
        f"- segments of {segment_bytes >> 10} KiB; their CRC32C, which each end takes once, at "
        f"{checksum_speed(segment_bytes) / 1e9:.1f} GB/s in the cache",
    ]
    if num_rounds < MIN_ROUNDS:
        lines.append(f"- a trial: a result takes at least {MIN_ROUNDS} rounds, and this has {num_rounds}")
    lines += [
        "",
        f"Median (lowest-highest) of {num_rounds} rounds; shares are taken within a round. Milliseconds are processor time of",
        "either process.",
        "",
        make_table(turns, sizes),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Page transports beside their libraries alone and a plain copy.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of every arm (default: %(default)s)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 8, 64], metavar="MIB", help="sizes of a transfer (default: 1 8 64)"
    )
    parser.add_argument(
        "--segment",
        type=int,
        default=MAX_SEGMENT_BYTES >> 10,
        metavar="KIB",
        help="a segment; the default, %(default)s, is a hand-off's longest, for pages of that size and more",
    )
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER", help="where to write"
    )
    flags = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.page_transports", *sys.argv[1:]])
    sizes, segment_bytes = [size << 20 for size in flags.sizes], flags.segment << 10
    ready, child_ready = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(child_ready, segment_bytes), daemon=True)
    receiver.start()
    try:
        address, gloo_port = ready.recv()
        process = psutil.Process(receiver.pid)
        turns = asyncio.run(
            measure_all(address, gloo_port, process, sizes=sizes, segment_bytes=segment_bytes, num_rounds=flags.rounds)
        )
    finally:
        receiver.kill()
        receiver.join()
    report = make_report(turns, sizes, command=command, segment_bytes=segment_bytes)
    (flags.results / "page_transports.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main()
