"""What the contract suite runs over: a sink that keeps what it takes, and one page path per transport, each with the same way
to break it, stall it and count what is left."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from kv_transfer.fallback_transport import FallbackTransport
from kv_transfer.grpc_page_service import GrpcPageService
from kv_transfer.grpc_page_transport import GrpcPageTransport
from kv_transfer.hold_off import HoldOff
from kv_transfer.loopback_transport import LoopbackTransport
from kv_transfer.page_frame import MAX_FRAME_BYTES
from kv_transfer.page_transport import PageSink, PageTransport, Segment
from kv_transfer.pair_thread import NAME as PAIR_THREAD_NAME
from kv_transfer.receive_ledger import ReceiveLedger
from kv_transfer.shared_memory_page_service import SharedMemoryPageService
from kv_transfer.shared_memory_page_transport import SharedMemoryPageTransport
from kv_transfer.shared_ring import FILE_NAME
from kv_transfer.torch_distributed_page_service import TorchDistributedPageService
from kv_transfer.torch_distributed_page_transport import TorchDistributedPageTransport
from serving_core.clock import MonotonicClock
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import Incarnation, PageId, RequestId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.rpc.channel import make_server
from serving_core.transfer_ticket import TransferTicket

LAYOUT = KVPageLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_size=16, dtype=KVDType.FLOAT32)  # 4096 bytes
MAX_SEGMENT_BYTES = 1365  # three of them and one byte more make a page
NUM_PROMPT_TOKENS = 3 * LAYOUT.page_size + 1
STALL_TIMEOUT_S = 0.6
"""For the tests that wait for it."""
PATIENCE_S = 10.0
"""For all others, so that a busy machine is no stall."""
DECODE = WorkerId("decode-0")
TORCH_THREADS = ("gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv")
RESERVATION = ReservationId("00112233445566778899aabbccddeeff")


def make_ticket(
    *,
    attempt: int = 1,
    address: str = "127.0.0.1:1",
    reservation_id: ReservationId = RESERVATION,
    num_prompt_tokens: int = NUM_PROMPT_TOKENS,
    num_cached_tokens: int = 0,
    incarnation: str = "first",
    layout: KVPageLayout = LAYOUT,
) -> TransferTicket:
    return TransferTicket(
        reservation_id=reservation_id,
        key=SequenceKey(RequestId("request")),
        attempt=attempt,
        decode_worker_id=DECODE,
        decode_incarnation=Incarnation(incarnation),
        decode_address=address,
        layout=layout,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        lease_s=6.0,
    )


class PatternSource:
    """Pages whose bytes tell which page they belong to."""

    def page_memory(self, page_id: PageId) -> memoryview:
        return memoryview(page_bytes(page_id))


@functools.cache
def page_bytes(page_id: int) -> bytes:
    return bytes((page_id * 131 + index * 7 + (index >> 8)) & 0xFF for index in range(LAYOUT.page_bytes))


def cut_page(ticket: TransferTicket, ordinal: int, *, max_segment_bytes: int = MAX_SEGMENT_BYTES) -> Iterator[Segment]:
    """Page ``ordinal`` with the bytes of the page id of the same number."""
    memory = memoryview(page_bytes(ordinal))
    for offset in range(0, len(memory), max_segment_bytes):
        yield Segment(
            reservation_id=ticket.reservation_id,
            attempt=ticket.attempt,
            page_ordinal=ordinal,
            offset=offset,
            payload=memory[offset : offset + max_segment_bytes],
        )


class RecordingSink:
    """A ``PageSink`` with one page array per reservation; ``num_copies`` counts segments that were written into a page."""

    def __init__(self) -> None:
        self._attempts: dict[ReservationId, int] = {}
        self._ledgers: dict[ReservationId, ReceiveLedger] = {}
        self.pages: dict[ReservationId, dict[int, bytearray]] = {}
        self.batch_sizes: list[int] = []
        self.num_copies = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def reserve(self, ticket: TransferTicket) -> None:
        ordinals = range(ticket.first_page, ticket.num_prompt_pages)
        self._attempts[ticket.reservation_id] = ticket.attempt
        self._ledgers[ticket.reservation_id] = ReceiveLedger(ticket.layout, ticket.first_page, len(ordinals))
        self.pages[ticket.reservation_id] = {ordinal: bytearray(ticket.layout.page_bytes) for ordinal in ordinals}

    def is_complete(self, ticket: TransferTicket) -> bool:
        return self._ledgers[ticket.reservation_id].is_complete

    def num_bytes_received(self, ticket: TransferTicket) -> int:
        return self._ledgers[ticket.reservation_id].num_bytes_received

    async def accept(self, segments: Sequence[Segment]) -> None:
        self.batch_sizes.append(len(segments))
        await self.gate.wait()
        reservation_id, attempt = segments[0].reservation_id, segments[0].attempt
        assert all((segment.reservation_id, segment.attempt) == (reservation_id, attempt) for segment in segments)
        if reservation_id not in self._attempts:
            raise Refused(RefusalCode.UNKNOWN_RESERVATION, f"Reservation {reservation_id} is not held here.")
        if attempt != self._attempts[reservation_id]:
            raise Refused(RefusalCode.STALE_ATTEMPT, f"Attempt {attempt} is not {self._attempts[reservation_id]}.")
        for segment in self._ledgers[reservation_id].add(segments):
            page = self.pages[reservation_id][segment.page_ordinal]
            place = segment.place_in(np.frombuffer(page, dtype=np.uint8))
            place[...] = np.frombuffer(segment.payload, dtype=np.uint8).reshape(place.shape)
            self.num_copies += 1

    def assert_pages_equal_source(self, ticket: TransferTicket) -> None:
        assert self.is_complete(ticket)
        for ordinal, page in self.pages[ticket.reservation_id].items():
            assert bytes(page) == page_bytes(ordinal)

    def assert_untouched(self, ticket: TransferTicket) -> None:
        assert self.num_copies == 0
        assert not any(any(page) for page in self.pages.get(ticket.reservation_id, {}).values())


class PagePath(Protocol):
    """A transport, the sink it leads to, and a hand on the way between them."""

    transport: PageTransport
    sink: RecordingSink
    address: str

    async def break_way(self) -> None:
        """From now on the receiver is gone."""

    async def mend_way(self) -> None:
        """The receiver is back, with its pages."""

    async def close(self) -> None:
        """Release both ends."""


class LoopbackPath:
    def __init__(self, stall_timeout_s: float) -> None:
        self.sink = RecordingSink()
        self.address = "127.0.0.1:1"  # where nobody has to listen
        self._sinks: dict[WorkerId, PageSink] = {DECODE: self.sink}
        self.transport: PageTransport = LoopbackTransport(self._sinks, stall_timeout_s=stall_timeout_s)

    async def break_way(self) -> None:
        del self._sinks[DECODE]

    async def mend_way(self) -> None:
        self._sinks[DECODE] = self.sink

    async def close(self) -> None:
        await self.transport.close()


class GrpcPath:
    def __init__(self, stall_timeout_s: float) -> None:
        self.sink = RecordingSink()
        self.service = GrpcPageService(self.sink, max_batch_segments=4)
        self.transport: PageTransport = GrpcPageTransport(max_unanswered_segments=4, stall_timeout_s=stall_timeout_s)
        self.address = "127.0.0.1:0"

    async def break_way(self) -> None:
        await self._server.stop(None)

    async def mend_way(self) -> None:
        self._server = make_server(max_message_bytes=MAX_FRAME_BYTES)
        self.service.add_to_server(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address)}"
        await self._server.start()

    async def close(self) -> None:
        await self.transport.close()
        await self._server.stop(None)


class SharedMemoryPath:
    def __init__(self, stall_timeout_s: float) -> None:
        self.sink = RecordingSink()
        self.service = SharedMemoryPageService(self.sink)
        self.transport: PageTransport = SharedMemoryPageTransport(max_unanswered_segments=4, stall_timeout_s=stall_timeout_s)
        # nobody listens here, but nobody else has the address meanwhile
        self._port = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._port.getsockname()[1]}"

    async def break_way(self) -> None:
        await self.service.close()

    async def mend_way(self) -> None:
        self.service.start(self.address, make_ticket().decode_incarnation)

    async def close(self) -> None:
        await self.transport.close()
        await self.service.close()
        self._port.close()


class TorchDistributedPath:
    """Without a hold-off, so that a way that was mended is taken at once."""

    def __init__(self, stall_timeout_s: float) -> None:
        self.sink = RecordingSink()
        self.service = TorchDistributedPageService(self.sink, stall_timeout_s=stall_timeout_s)
        self.transport: PageTransport = TorchDistributedPageTransport(
            "127.0.0.1",
            hold_off=HoldOff(MonotonicClock(), first_s=0.0),
            max_unanswered_segments=4,
            stall_timeout_s=stall_timeout_s,
        )
        self.address = "127.0.0.1:0"

    async def break_way(self) -> None:
        await self._server.stop(None)

    async def mend_way(self) -> None:
        self._server = make_server(max_message_bytes=MAX_FRAME_BYTES)
        self.service.add_to_server(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address)}"
        self.service.start(self.address, make_ticket().decode_incarnation)
        await self._server.start()

    async def close(self) -> None:
        await self.transport.close()
        await self.service.close()
        await self._server.stop(None)


class FallbackPath(GrpcPath):
    """A receiver out of shared memory's reach."""

    def __init__(self, stall_timeout_s: float) -> None:
        super().__init__(stall_timeout_s)
        self.transport = FallbackTransport([SharedMemoryPageTransport(stall_timeout_s=stall_timeout_s), self.transport])


TRANSPORTS = ("loopback", "grpc", "shared_memory", "torch_distributed", "fallback")


async def open_path(name: str, stall_timeout_s: float) -> PagePath:
    path: PagePath
    if name == "loopback":
        return LoopbackPath(stall_timeout_s)
    match name:
        case "grpc":
            path = GrpcPath(stall_timeout_s)
        case "shared_memory":
            path = SharedMemoryPath(stall_timeout_s)
        case "torch_distributed":
            path = TorchDistributedPath(stall_timeout_s)
        case _:
            path = FallbackPath(stall_timeout_s)
    await path.mend_way()
    return path


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that tells nobody when it happens, five seconds at most."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - a test looks on from outside
            await asyncio.sleep(0.002)


async def assert_no_leaks() -> None:
    """No task but the test's own is left, no ring, and nothing of a pair; what was cancelled gets a moment to end."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=1.0)
    assert not [task for task in left if not task.done()]
    await until(lambda: num_rings() == 0)
    await until(lambda: num_pair_threads() == 0)


def num_pair_threads() -> int:
    """Threads of this process that belong to a pair: ours, gloo's and the store's."""
    gc.collect()
    ours = sum(thread.name.startswith(PAIR_THREAD_NAME) for thread in threading.enumerate())
    return ours + sum(name.startswith(TORCH_THREADS) for name in thread_names())


def thread_names() -> list[str]:
    """What the kernel calls the threads of this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text(encoding="utf-8").strip())
    return names


def num_rings() -> int:
    """Descriptors and mappings of shared rings in this process, out of reach of Python's own."""
    gc.collect()
    return num_rings_of(os.getpid())


def num_rings_of(pid: int) -> int:
    """The same of another process."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").count(FILE_NAME)
    return maps + sum(FILE_NAME in _target_of(link) for link in Path(f"/proc/{pid}/fd").iterdir())


def _target_of(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # the one that was open for the listing
        return ""
