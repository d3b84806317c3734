"""The router's calls to one worker process over gRPC. Owns the channel; maps every gRPC error to ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc.aio

from router.registered_worker import MAX_SILENCE_S
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RouterId, SequenceKey, WorkerId
from serving_core.page_state import PagesSnapshot
from serving_core.rpc.channel import open_channel
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.rpc.convert import key_to_pb, pages_from_pb, refusal_from_pb, request_to_pb, ticket_from_pb, ticket_to_pb
from serving_core.rpc.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from serving_core.transfer_ticket import TransferTicket
from serving_core.worker_status import PhaseName, WorkerHello

_T = TypeVar("_T")


class WorkerClient:
    """``WorkerCalls`` over one channel, for one incarnation. Must be made on the running loop.

    A worker answers between two engine steps. A ``Reserve`` that is not answered in time was turned away; a ``Start`` that is
    not breaks the attempt, so it waits as long as the worker's status may be away. A release that is not is a hint lost.
    """

    def __init__(
        self,
        hello: WorkerHello,
        *,
        router_id: RouterId,
        token: ClusterToken = OPEN,
        reserve_timeout_s: float = 5.0,
        start_timeout_s: float = MAX_SILENCE_S,
        release_timeout_s: float = 2.0,
    ) -> None:
        self._worker_id: WorkerId = hello.worker_id
        self._router_id = router_id
        self._metadata = token.metadata
        self._reserve_timeout_s = reserve_timeout_s
        self._start_timeout_s = start_timeout_s
        self._release_timeout_s = release_timeout_s
        self._is_closed = False
        self._channel = open_channel(hello.address)
        self._decode = decode_pb2_grpc.DecodeStub(self._channel)
        self._prefill = prefill_pb2_grpc.PrefillStub(self._channel)
        self._worker = worker_pb2_grpc.WorkerStub(self._channel)

    async def reserve(self, request: GenerateRequest, attempt: int, *, num_evictions: int) -> TransferTicket:
        message = decode_pb2.ReserveRequest(
            router_id=self._router_id, request=request_to_pb(request), attempt=attempt, num_evictions=num_evictions
        )
        try:
            reply = await self._answer(self._decode.Reserve(message, timeout=self._reserve_timeout_s, metadata=self._metadata))
        except TimeoutError:  # its turn did not come; what it may have granted meanwhile is the caller's to release
            raise Refused(
                RefusalCode.RESOURCE_EXHAUSTED, f"{self._worker_id} granted no pages within {self._reserve_timeout_s:g} s"
            ) from None
        if reply.HasField("refusal"):
            raise refusal_from_pb(reply.refusal)
        return ticket_from_pb(reply.ticket)

    async def start(self, request: GenerateRequest, ticket: TransferTicket) -> None:
        message = prefill_pb2.StartRequest(
            router_id=self._router_id, request=request_to_pb(request), ticket=ticket_to_pb(ticket)
        )
        try:
            reply = await self._answer(self._prefill.Start(message, timeout=self._start_timeout_s, metadata=self._metadata))
        except TimeoutError:
            raise WorkerLost(f"{self._worker_id} did not take the prompt within {self._start_timeout_s:g} s") from None
        if reply.HasField("refusal"):
            raise refusal_from_pb(reply.refusal)

    async def release(self, phase: PhaseName, key: SequenceKey, attempt: int) -> None:
        timeout_s = self._release_timeout_s
        try:
            if phase is PhaseName.DECODE:
                from_decode = decode_pb2.DecodeReleaseRequest(key=key_to_pb(key), attempt=attempt)
                await self._answer(self._decode.Release(from_decode, timeout=timeout_s, metadata=self._metadata))
            else:
                from_prefill = prefill_pb2.PrefillReleaseRequest(key=key_to_pb(key), attempt=attempt)
                await self._answer(self._prefill.Release(from_prefill, timeout=timeout_s, metadata=self._metadata))
        except TimeoutError:
            raise WorkerLost(f"{self._worker_id} did not answer a release within {timeout_s:g} s") from None

    async def pages(self, *, is_summary: bool, timeout_s: float) -> PagesSnapshot:
        message = worker_pb2.GetPagesRequest(is_summary=is_summary)
        try:
            return pages_from_pb(await self._answer(self._worker.GetPages(message, timeout=timeout_s, metadata=self._metadata)))
        except TimeoutError:
            raise WorkerLost(f"{self._worker_id} did not show its pages within {timeout_s:g} s") from None

    async def close(self) -> None:
        self._is_closed = True
        # A worker that only lost its link may still hear the releases that this caused.
        await self._channel.close(self._release_timeout_s)

    async def _answer(self, call: Awaitable[_T]) -> _T:
        """The reply; ``TimeoutError`` past the deadline, ``WorkerLost`` for every other way of not getting one."""
        if self._is_given_up():
            raise WorkerLost(f"the connection to {self._worker_id} was given up")
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            raise WorkerLost(f"{self._worker_id} did not answer: {error.code().name.lower()} {error.details()}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_given_up() and task is not None and not task.cancelling():
                raise WorkerLost(f"the connection to {self._worker_id} was given up") from None
            raise

    def _is_given_up(self) -> bool:
        return self._is_closed
