"""The Decode service over gRPC: messages to calls of the phase and back. Holds no state of its own."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeAlias

import grpc.aio

from decode_worker.decode_phase import DecodePhase
from llm_engine.engine_calls import EngineCalls, run_between_steps
from serving_core.errors import RefusalCode, Refused
from serving_core.rpc import convert
from serving_core.rpc.bounded_call import bounded_call
from serving_core.rpc.v1 import decode_pb2, decode_pb2_grpc
from serving_core.transfer_ticket import TransferTicket

_ReserveContext: TypeAlias = "grpc.aio.ServicerContext[decode_pb2.ReserveRequest, decode_pb2.ReserveReply]"
_CommitContext: TypeAlias = "grpc.aio.ServicerContext[decode_pb2.CommitRequest, decode_pb2.CommitReply]"
_ReleaseContext: TypeAlias = "grpc.aio.ServicerContext[decode_pb2.DecodeReleaseRequest, decode_pb2.DecodeReleaseReply]"


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """``max_wait_s`` bounds every call whose caller set no deadline, or a later one."""

    def __init__(self, *, phase: DecodePhase, engine: EngineCalls, max_wait_s: float = 30.0) -> None:
        self._phase = phase
        self._engine = engine
        self._max_wait_s = max_wait_s

    def add_to_server(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: _ReserveContext
    ) -> decode_pb2.ReserveReply:
        answer: TransferTicket | Refused
        try:
            # Twice the time: a wait for pages ends below with a refusal, which tells the caller more than a status.
            async with bounded_call(context, 2 * self._max_wait_s):
                answer = await self._reserve(request)
        except Refused as refused:
            answer = refused
        if isinstance(answer, Refused):
            return decode_pb2.ReserveReply(refusal=convert.refusal_to_pb(answer))
        return decode_pb2.ReserveReply(ticket=convert.ticket_to_pb(answer))

    async def _reserve(self, message: decode_pb2.ReserveRequest) -> TransferTicket | Refused:
        request = convert.request_from_pb(message.request)
        router_id = convert.router_id_from_pb(message.router_id)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[TransferTicket | Refused] = loop.create_future()

        def on_engine(answer: TransferTicket | Refused) -> None:
            with suppress(RuntimeError):  # the event loop has closed: the caller is gone, and so will be its lease
                loop.call_soon_threadsafe(_set_once, answered, answer)

        try:
            async with asyncio.timeout(self._max_wait_s):
                await run_between_steps(
                    self._engine,
                    lambda: self._phase.reserve(
                        request, message.attempt, router_id, on_engine, num_evictions=message.num_evictions
                    ),
                )
                return await answered
        except (asyncio.CancelledError, TimeoutError) as end:
            # The caller's deadline has passed or it gave up: nobody will use the ticket.
            self._engine.call(lambda: self._phase.withdraw(request.key, message.attempt, on_engine))
            if isinstance(end, TimeoutError):
                raise Refused(
                    RefusalCode.RESOURCE_EXHAUSTED, f"No pages came free for {request.key} within {self._max_wait_s:g} s."
                ) from None
            raise

    async def Commit(  # noqa: N802
        self, request: decode_pb2.CommitRequest, context: _CommitContext
    ) -> decode_pb2.CommitReply:
        try:
            commit = convert.commit_from_pb(request.commit)
            async with bounded_call(context, self._max_wait_s):
                await run_between_steps(self._engine, lambda: self._phase.commit(commit))
        except Refused as refused:
            return decode_pb2.CommitReply(refusal=convert.refusal_to_pb(refused))
        return decode_pb2.CommitReply()

    async def Release(  # noqa: N802
        self, request: decode_pb2.DecodeReleaseRequest, context: _ReleaseContext
    ) -> decode_pb2.DecodeReleaseReply:
        try:
            key = convert.key_from_pb(request.key)
        except Refused:
            return decode_pb2.DecodeReleaseReply()  # names nothing, so there is nothing to release
        async with bounded_call(context, self._max_wait_s):
            await run_between_steps(self._engine, lambda: self._phase.abort(key, request.attempt))
        return decode_pb2.DecodeReleaseReply()


def _set_once(answered: asyncio.Future[TransferTicket | Refused], answer: TransferTicket | Refused) -> None:
    if not answered.done():  # the caller may have gone, or been answered that it gave way to a higher attempt
        answered.set_result(answer)
