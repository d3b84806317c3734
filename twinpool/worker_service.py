"""The ``Worker`` gRPC service: what every worker answers, whatever its phases."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from serving_core.page_state import PagesSnapshot
from serving_core.rpc.convert import pages_to_pb
from serving_core.rpc.v1 import worker_pb2, worker_pb2_grpc


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """``read_pages(is_summary)`` takes the snapshot between two engine steps."""

    def __init__(self, read_pages: Callable[[bool], Awaitable[PagesSnapshot]]) -> None:
        self._read_pages = read_pages

    async def GetPages(  # noqa: N802 - the name is the proto's
        self,
        request: worker_pb2.GetPagesRequest,
        context: object,
    ) -> worker_pb2.PagesSnapshot:
        return pages_to_pb(await self._read_pages(request.is_summary))
