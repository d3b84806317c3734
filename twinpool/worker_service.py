"""The ``Worker`` gRPC service: what every worker answers, whatever its phases."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc.aio

from serving_core.page_state import PagesSnapshot
from serving_core.rpc.bounded_call import bounded_call
from serving_core.rpc.convert import pages_to_pb
from serving_core.rpc.v1 import worker_pb2, worker_pb2_grpc

_GetPagesContext: TypeAlias = "grpc.aio.ServicerContext[worker_pb2.GetPagesRequest, worker_pb2.PagesSnapshot]"


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """``read_pages(is_summary)`` takes the snapshot between two engine steps. ``max_wait_s`` bounds every call whose caller set
    no deadline, or a later one."""

    def __init__(self, read_pages: Callable[[bool], Awaitable[PagesSnapshot]], *, max_wait_s: float = 30.0) -> None:
        self._read_pages = read_pages
        self._max_wait_s = max_wait_s

    async def GetPages(  # noqa: N802 - the name is the proto's
        self,
        request: worker_pb2.GetPagesRequest,
        context: _GetPagesContext,
    ) -> worker_pb2.PagesSnapshot:
        async with bounded_call(context, self._max_wait_s):
            snapshot = await self._read_pages(request.is_summary)
        return pages_to_pb(snapshot)
