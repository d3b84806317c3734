"""Bytes that are no message, at a gRPC server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from serving_core.errors import RefusalCode, Refused
from serving_core.rpc.channel import make_server, open_channel
from serving_core.rpc.v1 import router_link_pb2, router_link_pb2_grpc, worker_pb2, worker_pb2_grpc

NO_MESSAGE = b"\xff" * 32
GET_PAGES = "/twinpool.v1.Worker/GetPages"
CONNECT = "/twinpool.v1.RouterLink/Connect"


class _Worker(worker_pb2_grpc.WorkerServicer):
    async def GetPages(self, request: worker_pb2.GetPagesRequest, context: object) -> worker_pb2.PagesSnapshot:  # noqa: N802
        return worker_pb2.PagesSnapshot(num_pages=5 if request.is_summary else 6)


class _Link(router_link_pb2_grpc.RouterLinkServicer):
    def __init__(self) -> None:
        self.refused: Refused | None = None

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[router_link_pb2.WorkerMessage], context: object
    ) -> AsyncIterator[router_link_pb2.RouterMessage]:
        try:
            async for message in request_iterator:
                yield router_link_pb2.RouterMessage(welcome=router_link_pb2.Welcome(router_id=message.hello.worker_id))
        except Refused as refused:
            self.refused = refused


@asynccontextmanager
async def serving(link: _Link) -> AsyncIterator[Any]:
    """A channel to a server of both services, untyped since what is sent on it is of no type."""
    server = make_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(_Worker(), server)
    router_link_pb2_grpc.add_RouterLinkServicer_to_server(link, server)
    channel = open_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    try:
        async with asyncio.timeout(5):
            yield channel
    finally:
        await channel.close()
        await server.stop(None)


async def test_a_single_request_is_answered_with_a_status_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="grpc")
    async with serving(_Link()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary(GET_PAGES)(NO_MESSAGE)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.value.details() == f"The 32 bytes sent to {GET_PAGES} are not the protobuf message that it takes."
        pages = await worker_pb2_grpc.WorkerStub(channel).GetPages(worker_pb2.GetPagesRequest(is_summary=True))
        assert pages.num_pages == 5
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/twinpool.v1.Worker/Nothing")(NO_MESSAGE)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING] == []


async def test_a_message_of_a_stream_is_refused_where_it_is_read(caplog: pytest.LogCaptureFixture) -> None:
    link = _Link()
    hello = router_link_pb2.WorkerMessage(hello=router_link_pb2.WorkerHello(worker_id="w")).SerializeToString()
    async with serving(link) as channel:
        call = channel.stream_stream(CONNECT)(iter((hello, NO_MESSAGE)))
        answers = [router_link_pb2.RouterMessage.FromString(answer) async for answer in call]
        assert [answer.welcome.router_id for answer in answers] == ["w"]
    assert link.refused is not None
    assert link.refused.code is RefusalCode.MALFORMED
    assert CONNECT in str(link.refused)
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING] == []


async def test_an_address_never_chooses_how_it_is_reached(tmp_path: object) -> None:
    server = make_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(_Worker(), server)
    assert server.add_insecure_port(f"unix:{tmp_path}/socket") == 1
    await server.start()
    channel = open_channel(f"unix:{tmp_path}/socket")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await worker_pb2_grpc.WorkerStub(channel).GetPages(worker_pb2.GetPagesRequest(), timeout=5)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    await channel.close()
    await server.stop(None)
