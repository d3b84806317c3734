"""GetPages of a worker that cannot answer."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from serving_core.errors import WorkerLost
from serving_core.page_state import PagesSnapshot
from serving_core.rpc.channel import make_server, open_channel
from serving_core.rpc.v1 import worker_pb2, worker_pb2_grpc
from twinpool.worker_service import WorkerService


async def _stopped(is_summary: bool) -> PagesSnapshot:
    raise WorkerLost("The engine of this worker has stopped.")


async def _stuck(is_summary: bool) -> PagesSnapshot:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("read_pages", "code"), [(_stopped, grpc.StatusCode.UNAVAILABLE), (_stuck, grpc.StatusCode.DEADLINE_EXCEEDED)]
)
async def test_it_ends_with_a_status_in_bounded_time(read_pages: object, code: grpc.StatusCode) -> None:
    server = make_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(read_pages, max_wait_s=0.1), server)  # type: ignore[arg-type]
    channel = open_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    async with asyncio.timeout(3):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await worker_pb2_grpc.WorkerStub(channel).GetPages(worker_pb2.GetPagesRequest())
    assert error.value.code() is code
    await channel.close()
    await server.stop(None)
