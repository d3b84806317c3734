"""Every channel of a running server against those who do not belong to it: each method of each gRPC service, at the router's
port and at every worker's, and each page path. A stranger learns nothing, and nothing is kept for him."""

from __future__ import annotations

import asyncio
import multiprocessing
import uuid
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from kv_transfer import grpc_page_service, pair_call
from kv_transfer.page_transport import PageTransport
from llm_engine.load_model import LoadedModel, load_model
from serving_core.clock import MonotonicClock
from serving_core.engine_config import EngineConfig
from serving_core.errors import WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType
from serving_core.page_state import PagesSnapshot
from serving_core.rpc.channel import make_server, open_channel
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.rpc.convert import hello_to_pb
from serving_core.rpc.v1 import decode_pb2, prefill_pb2, router_link_pb2, worker_pb2, worker_pb2_grpc
from serving_core.sampling_params import SamplingParams
from serving_core.transfer_ticket import TransferTicket
from tests.contract.page_path import RecordingSink, cut_page, make_ticket, num_pair_threads, num_rings, until
from tests.integration.in_process_server import COLOCATED, DECODE, PREFILL, InProcessServer, in_process_server
from tests.tiny_model import write_tiny_gguf
from tests.unit.twinpool.test_page_paths import place
from twinpool.page_paths import PageServices, make_transport
from twinpool.transfer_way import TransferWay
from twinpool.worker import Worker
from twinpool.worker_service import WorkerService
from twinpool.worker_spec import WorkerSpec

TOKEN = ClusterToken.draw()
STRANGERS = {
    "none": OPEN,
    "another": ClusterToken.draw(),
    "the beginning of it": ClusterToken(TOKEN.value[:-1]),
    "more than it": ClusterToken(TOKEN.value + "0"),
}
by_stranger = pytest.mark.parametrize("token", STRANGERS.values(), ids=STRANGERS.keys())
WORKERS = (("prefill-0", PREFILL), ("decode-0", DECODE), ("colocated-0", COLOCATED))
ENGINE = EngineConfig(
    dtype=KVDType.FLOAT32,
    page_size=16,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    kv_cache_memory_bytes=1 << 20,
    num_threads=1,
)
BIG_BYTES = 48 << 20
"""Below what gRPC itself refuses."""


def methods() -> list[str]:
    """Paths of every method that any process of a server has."""
    modules: Sequence[Any] = (decode_pb2, prefill_pb2, worker_pb2, router_link_pb2)
    paths = [
        f"/{service.full_name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert len(paths) == 7, "Reserve, Commit, Release, Start, Release, GetPages, Connect"
    return [
        *paths,
        f"/{grpc_page_service.SERVICE}/{grpc_page_service.METHOD}",
        f"/{pair_call.SERVICE}/{pair_call.METHOD}",
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, dtype=KVDType.FLOAT32)


@pytest_asyncio.fixture
async def server(path: Path, loaded: LoadedModel) -> AsyncIterator[InProcessServer]:
    way = TransferWay.TORCH_DISTRIBUTED  # so that its service is there
    async with in_process_server(path, loaded, WORKERS, engine=ENGINE, transfer=way, token=TOKEN) as running:
        yield running


async def code_of(channel: grpc.aio.Channel, method: str, token: ClusterToken, message: bytes) -> tuple[str, str]:
    """What a call with one message ends with. Of the kind that sends everything at once: where messages are written one by one,
    gRPC may say that a write failed, and not why."""
    call: Any = channel.unary_unary(method)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(message, metadata=token.metadata, timeout=10)
    return error.value.code().name, str(error.value.details())


@by_stranger
async def test_every_method_at_every_port_refuses_him(server: InProcessServer, token: ClusterToken) -> None:
    answers = set()
    for address in (server.link_address, *(worker.hello.address for worker in server.workers.values())):
        async with open_channel(address) as channel:
            for method in (*methods(), "/twinpool.v1.Decode/NoSuchMethod", "/no.such.Service/Method"):
                for message in (b"", b"\xff" * 16, b"\0" * 4096):
                    answers.add(await code_of(channel, method, token, message))
    # the same for what is there and what is not, so that he does not even learn that
    assert answers == {("UNAUTHENTICATED", "The call does not carry this cluster's token.")}
    assert (await server.generate(make_request())).token_ids


@by_stranger
async def test_a_worker_that_does_not_belong_is_not_taken_in(server: InProcessServer, token: ClusterToken) -> None:
    hello = hello_to_pb(server.workers["decode-0"].hello)
    hello.worker_id = "decode-9"
    async with open_channel(server.link_address) as channel:
        message = router_link_pb2.WorkerMessage(hello=hello).SerializeToString()
        code, _ = await code_of(channel, "/twinpool.v1.RouterLink/Connect", token, message)
        assert code == "UNAUTHENTICATED"
    assert await worker_ids(server) == {name for name, _ in WORKERS}


async def test_a_whole_worker_of_another_server_says_why_it_is_alone(
    server: InProcessServer, path: Path, loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    spec = WorkerSpec(
        worker_id=WorkerId("decode-9"),
        phases=DECODE,
        model_path=path,
        model_name="model",
        engine=ENGINE,
        router_addresses=(server.link_address,),
        cluster_token=STRANGERS["another"],
    )
    crashes: list[BaseException] = []
    async with Worker.running(spec, loaded, on_crash=crashes.append):
        await until(lambda: any("does not carry this cluster's token" in record.message for record in caplog.records))
    assert not crashes
    assert await worker_ids(server) == {name for name, _ in WORKERS}


@pytest.mark.parametrize("way", [TransferWay.GRPC, TransferWay.SHARED_MEMORY, TransferWay.TORCH_DISTRIBUTED])
@by_stranger
async def test_a_page_path_takes_nothing_from_him(way: TransferWay, token: ClusterToken) -> None:
    sink, where = RecordingSink(), place(way)
    server = make_server(token=TOKEN)
    services = PageServices(sink, place=where, server=server, token=TOKEN)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    ticket = make_ticket(address=address, incarnation="i" * 32)
    sink.reserve(ticket)
    services.start(address, ticket.decode_incarnation)
    await server.start()
    # 1. a sender without the token gets no stream, or one that ends with its first segment
    for _ in range(3):
        stranger = make_transport(where, MonotonicClock(), token)
        with pytest.raises(WorkerLost):
            await send(stranger, ticket, 0)
        await stranger.close()
    # 2. nothing of it is left: no byte in a page, no ring, no group of torch.distributed
    assert sink.batch_sizes == []
    sink.assert_untouched(ticket)
    await until(lambda: (num_rings(), num_pair_threads()) == (0, 0))
    # 3. one that has it is served, the way that was asked for
    member = make_transport(where, MonotonicClock(), TOKEN)
    await send(member, ticket, *range(ticket.num_prompt_pages))
    assert dict(member.num_streams) == {way.value: 1}
    sink.assert_pages_equal_source(ticket)
    await member.close()
    await services.close()
    await server.stop(None)


@pytest.mark.parametrize("way", [TransferWay.GRPC, TransferWay.SHARED_MEMORY, TransferWay.TORCH_DISTRIBUTED])
async def test_members_of_one_server_serve_over_every_way(path: Path, loaded: LoadedModel, way: TransferWay) -> None:
    workers = (("prefill-0", PREFILL), ("decode-0", DECODE))
    async with in_process_server(path, loaded, workers, engine=ENGINE, transfer=way, token=TOKEN) as server:
        answer = await server.generate(make_request())
        assert len(answer.token_ids) == 8
        num_streams = await server.num_page_streams("prefill-0")
        assert (num_streams[way.value], sum(num_streams.values())) == (1, 1)
        await server.assert_no_leaks()


async def send(transport: PageTransport, ticket: TransferTicket, *ordinals: int) -> None:
    async with transport.open(ticket) as stream:
        for ordinal in ordinals:
            for segment in cut_page(ticket, ordinal):
                await stream.write(segment)
        await stream.flush()


def test_a_message_of_a_stranger_is_not_even_read() -> None:
    """In a process of its own, whose peak of memory the kernel knows."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_pages_alone, args=(there, TOKEN), daemon=True)
    process.start()
    try:
        address = here.recv()
        with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
            for token in STRANGERS.values():  # what first calls cost is there
                assert refusal(channel, token, b"") == "UNAUTHENTICATED"
            before = peak_bytes(process.pid)
            for token in STRANGERS.values():
                assert refusal(channel, token, bytes(BIG_BYTES)) == "UNAUTHENTICATED"
            assert peak_bytes(process.pid) - before < BIG_BYTES / 4
            # one of a member's is read, so that the figure above tells something
            assert refusal(channel, TOKEN, bytes(BIG_BYTES)) == "INVALID_ARGUMENT"
            assert peak_bytes(process.pid) - before > BIG_BYTES / 2
    finally:
        process.kill()
        process.join()
        here.close()
        there.close()


def serve_pages_alone(ready: Connection, token: ClusterToken) -> None:
    """A process with the service that every worker has, and no worker."""
    asyncio.run(_serve_pages_alone(ready, token))


async def _serve_pages_alone(ready: Connection, token: ClusterToken) -> None:
    server = make_server(token=token)
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(read_no_pages), server)
    ready.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await server.wait_for_termination()


async def read_no_pages(_is_summary: bool) -> PagesSnapshot:
    raise AssertionError("nobody's call is a call")


def refusal(channel: grpc.Channel, token: ClusterToken, message: bytes) -> str:
    call: Any = channel.unary_unary("/twinpool.v1.Worker/GetPages")
    with pytest.raises(grpc.RpcError) as error:
        call(message, metadata=token.metadata, timeout=30)
    return str(error.value.code().name)


def peak_bytes(pid: int | None) -> int:
    """The most memory that the process has had."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def make_request() -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompt = tuple(3 + 7 * index % 256 for index in range(40))
    return GenerateRequest(key=SequenceKey(RequestId(uuid.uuid4().hex)), prompt_token_ids=prompt, sampling=sampling)


async def worker_ids(server: InProcessServer) -> set[str]:
    """Whom the router knows."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.router.app), base_url="http://router") as client:
        return {worker["id"] for worker in (await client.get("/admin/workers")).json()["workers"]}
