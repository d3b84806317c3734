"""What is attacked: a server in this process with every kind of port, texts that are asked of it meanwhile, and on each decode
worker a reservation half of whose pages has arrived, so that every byte that is not to be touched is known."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil

from kv_transfer.grpc_page_service import METHOD, SERVICE
from kv_transfer.page_answer import decode_answer
from kv_transfer.page_frame import encode_frame
from kv_transfer.page_transport import Segment
from llm_engine.engine_calls import run_between_steps
from llm_engine.load_model import LoadedModel
from serving_core.engine_config import EngineConfig
from serving_core.errors import Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, RouterId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.page_state import PageState
from serving_core.rpc import convert
from serving_core.rpc.channel import open_channel
from serving_core.rpc.lasting_server import LastingServer
from serving_core.rpc.v1 import decode_pb2
from serving_core.sampling_params import SamplingParams
from serving_core.transfer_ticket import HandoffCommit, TransferTicket
from tests.contract.page_path import until
from tests.integration.in_process_server import DECODE, PREFILL, InProcessServer, in_process_server
from twinpool.http_server import HttpServer, listen
from twinpool.transfer_way import TransferWay
from twinpool.worker import Worker

LEASE_S = 2.0
ENGINE = EngineConfig(
    dtype=KVDType.FLOAT32,
    page_size=16,
    max_model_len=256,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    kv_cache_memory_bytes=4 << 20,
    num_threads=1,
    lease_s=LEASE_S,
)
WORKERS = (("prefill-0", PREFILL), ("prefill-1", PREFILL), ("decode-0", DECODE), ("decode-1", DECODE))
TORCH = dict.fromkeys(("prefill-1", "decode-1"), TransferWay.TORCH_DISTRIBUTED)
"""The others have shared memory; all have gRPC."""
SEGMENT_BYTES = 1024
NUM_HELD_TOKENS = 45
"""Of a held reservation's prompt: three pages."""
ATTEMPT = 2
"""Of the held reservations; there was an attempt before."""
STRANGER = RouterId("nobody")
NUM_TEXTS = 12
NUM_ANSWER_TOKENS = 24
MAX_HALF_OPEN = 24
ANSWER_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldReservation:
    """Two of each page's segments have ``arrived``; the others are ``missing``. Both are as an honest sender cuts them."""

    worker: Worker
    ticket: TransferTicket
    arrived: tuple[Segment, ...]
    missing: tuple[Segment, ...]

    async def page_bytes(self) -> list[bytes]:
        """What its pages hold now. Fails when it is not held any more."""

        def read() -> list[bytes]:
            assert self.worker._decode is not None
            sequence = self.worker._decode._held.get(self.ticket.key)
            assert sequence is not None, "the held reservation is gone"
            assert sequence.attempt == ATTEMPT
            assert sequence.reservation is not None
            assert {self.worker._pool.state(page_id) for page_id in sequence.reservation.page_ids} == {PageState.FILLING}
            return [bytes(self.worker._cache.page_memory(page_id)) for page_id in sequence.reservation.page_ids]

        return await run_between_steps(self.worker._loop, read)

    def renew(self) -> None:
        """As its router would."""
        self.worker._renew(frozenset({self.ticket.key}))


_INTERRUPTIONS = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,  # nobody listened
        grpc.StatusCode.CANCELLED,  # it had come, and nobody had looked at it
        grpc.StatusCode.INTERNAL,  # a write found the connection closed
    }
)


class Interrupted(Exception):
    """A call met a gRPC server that had just been broken."""


@dataclass(kw_only=True)
class Target:
    """The server under attack, and what attackers share."""

    server: InProcessServer
    http_port: int
    link_address: str
    held: tuple[HeldReservation, ...]
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    half_open: deque[asyncio.StreamWriter] = field(default_factory=deque)
    texts: dict[int, str] = field(default_factory=dict)
    num_answers: Counter[int] = field(default_factory=Counter)

    @property
    def worker_addresses(self) -> list[str]:
        return [worker.hello.address for worker in self.server.workers.values()]

    @property
    def grpc_servers(self) -> Mapping[str, LastingServer]:
        """By address."""
        router_server = self.server.router._server
        assert router_server is not None
        return {self.link_address: router_server} | {
            worker.hello.address: worker._server for worker in self.server.workers.values()
        }

    async def call(self, address: str, method: str, message: bytes, *, timeout_s: float = CALL_TIMEOUT_S) -> bytes:
        """A unary call of one who belongs to the cluster. Raises gRPC's ``AioRpcError``, or ``Interrupted``."""
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel_to(address).unary_unary(method)
        async with self.being_there(address):
            return await call(message, timeout=timeout_s, wait_for_ready=True)

    @asynccontextmanager
    async def being_there(self, address: str) -> AsyncIterator[None]:
        """Raises ``Interrupted`` for a call that met a gRPC server which another attack had just broken."""
        server = self.grpc_servers[address]
        before = server.num_replaced
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() in _INTERRUPTIONS:
                with suppress(TimeoutError):
                    await until(lambda: server.num_replaced > before)
                    raise Interrupted from error
            raise

    def stream(self, address: str, method: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        """The same for a stream."""
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel_to(address).stream_stream(method)
        return call(wait_for_ready=True)

    async def send_frames(self, address: str, frames: Sequence[bytes]) -> tuple[int, Exception | None]:
        """How many a worker's page port accepted of ``frames`` on one stream, and what ended that early: ``Refused`` or
        gRPC's. Raises ``Interrupted``."""
        call = self.stream(address, f"/{SERVICE}/{METHOD}")
        writing = asyncio.create_task(write_all(call, frames))
        num_accepted = 0
        try:
            async with self.being_there(address):
                while isinstance(answer := await call.read(), bytes):
                    num_accepted = decode_answer(answer)
        except (Refused, grpc.aio.AioRpcError) as error:
            return num_accepted, error
        finally:
            call.cancel()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        return num_accepted, None

    def _channel_to(self, address: str) -> grpc.aio.Channel:
        """One for all attackers."""
        if address not in self.channels:
            self.channels[address] = open_channel(address)
        return self.channels[address]

    def keep_open(self, writer: asyncio.StreamWriter) -> None:
        """A connection on which nothing more comes, until there are too many."""
        self.half_open.append(writer)
        while len(self.half_open) > MAX_HALF_OPEN:
            hang_up(self.half_open.popleft())

    def listening_ports(self) -> list[int]:
        """Every TCP port of this process, also those that torch.distributed has opened."""
        connections = psutil.Process().net_connections("tcp")
        return sorted({connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN})

    async def ask(self, number: int) -> None:
        """Ask for a text over HTTP; it has to be the same as the first time."""
        prompt = [3 + (number * 29 + index * 7) % 256 for index in range(20 + 5 * number)]
        body = {"prompt": prompt, "max_tokens": NUM_ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S) as client:
            answer = await client.post(f"http://127.0.0.1:{self.http_port}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["text"] == self.texts.setdefault(number, choice["text"]), f"text {number} is another one"
        self.num_answers[number] += 1

    async def ask_on(self) -> None:
        """One text after another, until cancelled."""
        while True:
            for number in range(NUM_TEXTS):
                await self.ask(number)

    async def watch_held(self) -> None:
        """Nothing touches the held pages; until cancelled."""
        before = [await held.page_bytes() for held in self.held]
        while True:
            for held in self.held:
                held.renew()
            assert [await held.page_bytes() for held in self.held] == before, "a page that nobody may write was written"
            await asyncio.sleep(LEASE_S / 8)

    async def finish_held(self) -> None:
        """The rest of each arrives, and what is committed is what was sent."""
        for held in self.held:
            held.renew()
            address = held.worker.hello.address
            num_accepted, error = await self.send_frames(address, [encode_frame(segment) for segment in held.missing])
            assert (num_accepted, error) == (len(held.missing), None)
            sent = sorted((*held.arrived, *held.missing), key=lambda segment: (segment.page_ordinal, segment.offset))
            assert b"".join(await held.page_bytes()) == b"".join(segment.payload for segment in sent)
            message = commit_of(held.ticket).SerializeToString()
            reply = decode_pb2.CommitReply.FromString(await self.call(address, "/twinpool.v1.Decode/Commit", message))
            assert not reply.HasField("refusal"), reply

    async def close(self) -> None:
        while self.half_open:
            hang_up(self.half_open.popleft())
        for channel in self.channels.values():
            await channel.close()


def hang_up(writer: asyncio.StreamWriter) -> None:
    """At once; what is unsent is dropped."""
    writer.transport.abort()
    writer.close()


async def write_all(call: grpc.aio.StreamStreamCall[bytes, bytes], messages: Sequence[bytes]) -> None:
    for message in messages:
        await call.write(message)
    await call.done_writing()


def commit_of(ticket: TransferTicket) -> decode_pb2.CommitRequest:
    num_bytes = (ticket.num_prompt_pages - ticket.first_page) * ticket.layout.page_bytes
    commit = HandoffCommit(
        reservation_id=ticket.reservation_id,
        key=ticket.key,
        attempt=ticket.attempt,
        token_id=5,
        logprobs=None,
        num_bytes_sent=num_bytes,
    )
    return decode_pb2.CommitRequest(commit=convert.commit_to_pb(commit))


def reserve_of(request: GenerateRequest, attempt: int) -> decode_pb2.ReserveRequest:
    return decode_pb2.ReserveRequest(router_id=STRANGER, request=convert.request_to_pb(request), attempt=attempt)


def make_request(name: str, num_prompt_tokens: int, *, first: int = 3) -> GenerateRequest:
    return GenerateRequest(
        key=SequenceKey(RequestId(name)),
        prompt_token_ids=tuple(3 + (first + 13 * index) % 256 for index in range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=2, temperature=0.0),
    )


@asynccontextmanager
async def attacked_server(path: Path, loaded: LoadedModel) -> AsyncIterator[Target]:
    """A target whose texts have all been told once. Fails at the end when anything is held, broke or was logged as an error."""
    logged = _Complaints()
    logging.getLogger().addHandler(logged)
    async with AsyncExitStack() as stack:
        stack.callback(logging.getLogger().removeHandler, logged)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.complain(context))
        server = await stack.enter_async_context(in_process_server(path, loaded, WORKERS, engine=ENGINE, transfers=TORCH))
        listener = listen("127.0.0.1", 0)
        http = HttpServer(server.router.app, listener, keep_alive_s=5, request_timeout_s=2.0)
        serving = asyncio.create_task(http.run())
        stack.push_async_callback(asyncio.wait, [serving])
        stack.callback(http.cut)
        (link_address,) = {link._address for worker in server.workers.values() for link in worker._links._links}
        target = Target(server=server, http_port=listener.getsockname()[1], link_address=link_address, held=())
        stack.push_async_callback(target.close)
        target.held = (await _hold(target, "decode-0"), await _hold(target, "decode-1"))
        watching = asyncio.create_task(target.watch_held())
        stack.callback(watching.cancel)
        for number in range(NUM_TEXTS):
            await target.ask(number)
        yield target
        if watching.done():
            watching.result()
        watching.cancel()
        await target.finish_held()
        for number in range(NUM_TEXTS):
            await target.ask(number)
        await server.assert_no_leaks(within_s=4 * LEASE_S)
    assert logged.complaints == []


async def _hold(target: Target, name: str) -> HeldReservation:
    worker = target.server.workers[name]
    address = worker.hello.address
    request = make_request(f"held-{name}", NUM_HELD_TOKENS, first=100)
    for attempt in range(1, ATTEMPT + 1):
        reply = await target.call(address, "/twinpool.v1.Decode/Reserve", reserve_of(request, attempt).SerializeToString())
    ticket = convert.ticket_from_pb(decode_pb2.ReserveReply.FromString(reply).ticket)
    noise = random.Random(name)
    arrived: list[Segment] = []
    missing: list[Segment] = []
    for ordinal in range(ticket.num_prompt_pages):
        for offset in range(0, ticket.layout.page_bytes, SEGMENT_BYTES):
            segment = Segment(
                reservation_id=ticket.reservation_id,
                attempt=ticket.attempt,
                page_ordinal=ordinal,
                offset=offset,
                payload=memoryview(bytes(noise.randrange(60) for _ in range(SEGMENT_BYTES))),  # small numbers, as floats
            )
            (arrived if offset < 2 * SEGMENT_BYTES else missing).append(segment)
    assert await target.send_frames(address, [encode_frame(segment) for segment in arrived]) == (len(arrived), None)
    return HeldReservation(worker=worker, ticket=ticket, arrived=tuple(arrived), missing=tuple(missing))


def resident_bytes() -> int:
    """Of this process, without what only waits to be collected."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def memory_peaks() -> tuple[int, int]:
    """The most memory of this process since ``reset_peak``: resident, and asked for. In bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    resident, asked = (re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE) for name in ("VmHWM", "VmPeak"))
    assert resident is not None
    assert asked is not None
    return int(resident[1]) * 1024, int(asked[1]) * 1024


def reset_peak() -> None:
    """Only of what is resident: Linux knows no other."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class _Complaints(logging.Handler):
    """Errors, and anything with a traceback, but for what grpcio says of methods that are no UTF-8."""

    def __init__(self) -> None:
        super().__init__()
        self.complaints: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (record.exc_info or record.levelno >= logging.ERROR) and not isinstance(record.msg, UnicodeDecodeError):
            self.complaints.append(self.format(record))

    def complain(self, context: Mapping[str, Any]) -> None:
        """As the event loop does."""
        if not isinstance(context.get("exception"), UnicodeDecodeError):
            self.complaints.append(str(context))
