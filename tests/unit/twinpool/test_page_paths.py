"""What ``--transfer`` makes a worker send over and listen on."""

from __future__ import annotations

import logging
import uuid

import pytest

from kv_transfer.page_socket import new_socket, socket_name
from serving_core.clock import ManualClock
from serving_core.errors import ConfigError
from serving_core.ids import Incarnation
from serving_core.rpc.channel import make_server
from tests.contract.page_path import RecordingSink, make_ticket
from twinpool import page_paths
from twinpool.page_paths import PagePlace, PageServices, make_transport
from twinpool.transfer_way import TransferWay

ADDRESS = "127.0.0.1:1"
INCARNATION = Incarnation(uuid.uuid4().hex)


def place(way: TransferWay, *, device: str = "cpu", is_fabric_trusted: bool = True) -> PagePlace:
    return PagePlace(way=way, host="127.0.0.1", device=device, is_fabric_trusted=is_fabric_trusted)


@pytest.mark.parametrize(
    ("where", "names"),
    [
        (place(TransferWay.AUTO), "shared_memory, grpc"),
        (place(TransferWay.AUTO, device="cuda:0"), "shared_memory, torch_distributed, grpc"),
        (place(TransferWay.AUTO, device="cuda:0", is_fabric_trusted=False), "shared_memory, grpc"),
        (place(TransferWay.GRPC, device="cuda:0"), "grpc"),
        (place(TransferWay.SHARED_MEMORY, device="cuda:0"), "shared_memory"),
        (place(TransferWay.TORCH_DISTRIBUTED), "torch_distributed, grpc"),
    ],
)
def test_each_way_has_its_transports(where: PagePlace, names: str) -> None:
    assert make_transport(where, ManualClock()).name == names


def test_where_there_is_no_shared_memory_auto_is_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_paths, "is_supported", lambda: False)
    assert make_transport(place(TransferWay.AUTO), ManualClock()).name == "grpc"
    with pytest.raises(ConfigError, match="needs Linux"):
        make_transport(place(TransferWay.SHARED_MEMORY), ManualClock())


@pytest.fixture(autouse=True)
def torch_with_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_paths, "missing_backend", lambda _device: None)


def test_a_torch_without_the_backend_is_refused_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_paths, "missing_backend", lambda _device: "NCCL")
    with pytest.raises(ConfigError, match="needs a torch with NCCL: use auto or grpc"):
        make_transport(place(TransferWay.TORCH_DISTRIBUTED, device="cuda"), ManualClock())
    assert make_transport(place(TransferWay.AUTO, device="cuda"), ManualClock()).name == "shared_memory, grpc"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (place(TransferWay.AUTO), "from GPU to GPU only"),
        (place(TransferWay.AUTO, device="cuda", is_fabric_trusted=False), "with --trust-fabric only"),
    ],
)
async def test_auto_says_why_torch_distributed_is_not_among_its_ways(
    caplog: pytest.LogCaptureFixture, where: PagePlace, words: str
) -> None:
    caplog.set_level(logging.INFO)
    transport = make_transport(where, ManualClock())
    ticket = make_ticket(address=ADDRESS)
    async with transport.open(ticket):
        pass
    await transport.close()
    message = caplog.records[0].message
    assert message.startswith("pages to decode-0 go over grpc. decode-0 at 127.0.0.1:1 cannot be reached through shared memory")
    assert words in message


async def test_grpc_alone_listens_nowhere_else() -> None:
    services = PageServices(RecordingSink(), place=place(TransferWay.GRPC), server=make_server())
    services.start(ADDRESS, INCARNATION)
    with new_socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(socket_name(ADDRESS, INCARNATION))
    await services.close()


async def test_torch_distributed_reaches_who_takes_it_and_nobody_else() -> None:
    for way in (TransferWay.TORCH_DISTRIBUTED, TransferWay.AUTO):
        server = make_server()
        services = PageServices(RecordingSink(), place=place(way), server=server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        services.start(address, INCARNATION)
        await server.start()
        transport = make_transport(place(TransferWay.TORCH_DISTRIBUTED), ManualClock())
        async with transport.open(make_ticket(address=address, incarnation=INCARNATION)) as stream:
            await stream.flush()
        taken = "torch_distributed" if way is TransferWay.TORCH_DISTRIBUTED else "grpc"
        assert dict(transport.num_streams) == {taken: 1}
        await transport.close()
        await server.stop(None)
        await services.close()


async def test_a_name_that_is_taken_costs_auto_a_warning_and_shared_memory_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with new_socket() as squatter:
        squatter.bind(socket_name(ADDRESS, INCARNATION))
        for way in (TransferWay.AUTO, TransferWay.SHARED_MEMORY):
            services = PageServices(RecordingSink(), place=place(way), server=make_server())
            if way is TransferWay.AUTO:
                services.start(ADDRESS, INCARNATION)
                assert [record.levelno for record in caplog.records] == [logging.WARNING]
            else:
                with pytest.raises(ConfigError, match="use auto or grpc"):
                    services.start(ADDRESS, INCARNATION)
            await services.close()
    # free again, it listens; closing twice is harmless
    services = PageServices(RecordingSink(), place=place(TransferWay.AUTO), server=make_server())
    services.start(ADDRESS, INCARNATION)
    await services.close()
    await services.close()
    assert services.num_refused_writes == {}
