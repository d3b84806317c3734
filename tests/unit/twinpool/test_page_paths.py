"""What ``--transfer`` makes a worker send over and listen on."""

from __future__ import annotations

import logging
import uuid

import pytest

from kv_transfer.page_socket import new_socket, socket_name
from serving_core.errors import ConfigError
from serving_core.ids import Incarnation
from serving_core.rpc.channel import make_server
from tests.contract.page_path import RecordingSink
from twinpool import page_paths
from twinpool.page_paths import PageServices, make_transport
from twinpool.transfer_way import TransferWay

ADDRESS = "127.0.0.1:1"
INCARNATION = Incarnation(uuid.uuid4().hex)


@pytest.mark.parametrize(
    ("way", "names"),
    [
        (TransferWay.AUTO, "shared_memory, grpc"),
        (TransferWay.GRPC, "grpc"),
        (TransferWay.SHARED_MEMORY, "shared_memory"),
    ],
)
def test_each_way_has_its_transports(way: TransferWay, names: str) -> None:
    assert make_transport(way).name == names


def test_where_there_is_no_shared_memory_auto_is_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_paths, "is_supported", lambda: False)
    assert make_transport(TransferWay.AUTO).name == "grpc"
    with pytest.raises(ConfigError, match="needs Linux"):
        make_transport(TransferWay.SHARED_MEMORY)


async def test_grpc_alone_listens_nowhere_else() -> None:
    services = PageServices(RecordingSink(), way=TransferWay.GRPC, server=make_server())
    services.start(ADDRESS, INCARNATION)
    with new_socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(socket_name(ADDRESS, INCARNATION))
    await services.close()


async def test_a_name_that_is_taken_costs_auto_a_warning_and_shared_memory_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with new_socket() as squatter:
        squatter.bind(socket_name(ADDRESS, INCARNATION))
        for way in (TransferWay.AUTO, TransferWay.SHARED_MEMORY):
            services = PageServices(RecordingSink(), way=way, server=make_server())
            if way is TransferWay.AUTO:
                services.start(ADDRESS, INCARNATION)
                assert [record.levelno for record in caplog.records] == [logging.WARNING]
            else:
                with pytest.raises(ConfigError, match="use auto or grpc"):
                    services.start(ADDRESS, INCARNATION)
            await services.close()
    # free again, it listens; closing twice is harmless
    services = PageServices(RecordingSink(), way=TransferWay.AUTO, server=make_server())
    services.start(ADDRESS, INCARNATION)
    await services.close()
    await services.close()
    assert services.num_refused_writes == {}
