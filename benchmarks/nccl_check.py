"""Checks the page path over torch.distributed between two devices: two processes, one on each, as a prefill and a decode worker
are. Sends an attempt's pages and compares every byte, sends them again over the same pair, measures, and kills the receiver.

It exists for NCCL, which nobody has run it on yet: ``--device cpu`` runs the same over gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.hold_off import HoldOff
from kv_transfer.outgoing_handoff import MAX_SEGMENT_BYTES
from kv_transfer.page_transport import Segment
from kv_transfer.torch_distributed_page_service import TorchDistributedPageService
from kv_transfer.torch_distributed_page_transport import TorchDistributedPageTransport
from serving_core.clock import MonotonicClock
from serving_core.errors import WorkerLost
from serving_core.ids import Incarnation, RequestId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.rpc.channel import make_server
from serving_core.transfer_ticket import TransferTicket

NUM_PAGES = 64
PAGE_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 60.0
"""NCCL's first communicator takes its time."""
DEATH_TIMEOUT_S = 15.0


class DigestingSink:
    """Puts segments where they belong and tells, page by page, what is there."""

    def __init__(self, report: Connection) -> None:
        self._report = report
        self._pages = np.zeros((NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
        self._num_missing = self._pages.size

    async def accept(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.place_in(self._pages[segment.page_ordinal])[...] = np.frombuffer(segment.payload, dtype=np.uint8)
            self._num_missing -= segment.payload.nbytes
        if self._num_missing == 0:
            self._report.send(_digest(self._pages))
            self._pages[...] = 0
            self._num_missing = self._pages.size


def receive(device: str, report: Connection) -> None:
    """The receiving process, until it is killed."""
    asyncio.run(_receive(device, report))


async def _receive(device: str, report: Connection) -> None:
    server = make_server()
    service = TorchDistributedPageService(
        DigestingSink(report), device=device, connect_timeout_s=CONNECT_TIMEOUT_S, stall_timeout_s=CONNECT_TIMEOUT_S
    )
    service.add_to_server(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    service.start(address, Incarnation("check"))
    await server.start()
    report.send(address)
    await asyncio.Event().wait()


async def check(device: str, receiver: SpawnProcess, report: Connection) -> list[str]:
    """What went wrong, in whole sentences; prints what went right."""
    address = await asyncio.to_thread(report.recv)
    pages = np.random.default_rng(7).integers(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
    transport = TorchDistributedPageTransport(
        "127.0.0.1",
        hold_off=HoldOff(MonotonicClock()),
        device=device,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        stall_timeout_s=CONNECT_TIMEOUT_S,
    )
    failures = []
    for number in range(3):
        started_at = time.perf_counter()
        await _send(transport, address, pages)
        seconds = time.perf_counter() - started_at
        if await asyncio.to_thread(report.recv) != _digest(pages):
            failures.append(f"In transfer {number} other bytes arrived than were sent.")
        print(f"transfer {number}: {pages.size / seconds / 1e9:.2f} GB/s{', with making the pair' if number == 0 else ''}")
    receiver.kill()
    killed_at = time.monotonic()
    try:
        await _send(transport, address, pages)
        failures.append("A killed receiver was not noticed.")
    except WorkerLost as lost:
        print(f"killed receiver: noticed after {time.monotonic() - killed_at:.2f} s ({lost})")
        if time.monotonic() - killed_at > DEATH_TIMEOUT_S:
            failures.append(f"A killed receiver was noticed after more than {DEATH_TIMEOUT_S:g} s.")
    await transport.close()
    return failures


async def _send(transport: TorchDistributedPageTransport, address: str, pages: npt.NDArray[np.uint8]) -> None:
    ticket = _ticket(address)
    async with transport.open(ticket) as stream:
        for ordinal, page in enumerate(pages):
            for offset in range(0, PAGE_BYTES, MAX_SEGMENT_BYTES):
                await stream.write(
                    Segment(
                        reservation_id=ticket.reservation_id,
                        attempt=1,
                        page_ordinal=ordinal,
                        offset=offset,
                        payload=page[offset : offset + MAX_SEGMENT_BYTES].data,
                    )
                )
        await stream.flush()


def _ticket(address: str) -> TransferTicket:
    return TransferTicket(
        reservation_id=ReservationId("00" * 16),
        key=SequenceKey(RequestId("check")),
        attempt=1,
        decode_worker_id=WorkerId("decode-0"),
        decode_incarnation=Incarnation("check"),
        decode_address=address,
        layout=KVPageLayout(num_layers=1, num_kv_heads=1, head_dim=64, page_size=16, dtype=KVDType.FLOAT32),
        num_prompt_tokens=16,
        num_cached_tokens=0,
        lease_s=60.0,
    )


def _digest(pages: npt.NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(pages.data).digest()


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 when a check failed, 2 when there are not two devices."""
    parser = argparse.ArgumentParser(
        prog="nccl_check", description="Sends pages between two GPUs over torch.distributed, without a server."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="NCCL or gloo (default: cuda)")
    is_cuda = parser.parse_args(words).device == "cuda"
    if is_cuda and torch.cuda.device_count() < 2:
        print(f"nccl_check: torch finds {torch.cuda.device_count()} CUDA devices and needs two; --device cpu uses gloo")
        return 2
    sender_device, receiver_device = ("cuda:0", "cuda:1") if is_cuda else ("cpu", "cpu")
    report, receivers_report = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(
        target=receive, args=(receiver_device, receivers_report), daemon=True
    )
    receiver.start()
    receivers_report.close()  # so that the end of the receiver is the end of its reports
    try:
        failures = asyncio.run(check(sender_device, receiver, report))
    except EOFError:
        failures = ["The receiving process ended before the check was over; what it wrote last says why."]
    finally:
        receiver.kill()
        receiver.join()
    for failure in failures:
        print(failure)
    return 1 if failures else 0
