"""The Prefill service over gRPC: messages to calls of the phase and back, and the tasks that run the hand-offs.

A hand-off belongs to this service from ``Start`` until its end is reported to the phase; it outlives the call that began it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TypeAlias

import grpc.aio

from kv_transfer.outgoing_handoff import OutgoingHandoff
from kv_transfer.page_transport import PageSource, PageTransport
from kv_transfer.transfer_plan import TransferPlan
from llm_engine.engine_calls import EngineCalls, run_between_steps, wait_shielded
from prefill_worker.commit_client import CommitClient
from prefill_worker.handoff_counters import HandoffCounters
from prefill_worker.prefill_phase import PrefillPhase
from serving_core.clock import Clock
from serving_core.errors import Refused, TwinpoolError, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RouterId
from serving_core.kv_page_layout import KVPageLayout
from serving_core.rpc import convert
from serving_core.rpc.bounded_call import bounded_call
from serving_core.rpc.v1 import prefill_pb2, prefill_pb2_grpc
from serving_core.transfer_ticket import TransferTicket

_StartContext: TypeAlias = "grpc.aio.ServicerContext[prefill_pb2.StartRequest, prefill_pb2.StartReply]"
_ReleaseContext: TypeAlias = "grpc.aio.ServicerContext[prefill_pb2.PrefillReleaseRequest, prefill_pb2.PrefillReleaseReply]"

_log = logging.getLogger(__name__)


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Lives on one event loop. Owns ``commits`` and the hand-off tasks; ``transport`` is the caller's.

    ``max_wait_s`` bounds every call whose caller set no deadline, or a later one.
    """

    def __init__(
        self,
        *,
        phase: PrefillPhase,
        engine: EngineCalls,
        layout: KVPageLayout,
        source: PageSource,
        transport: PageTransport,
        clock: Clock,
        commits: CommitClient | None = None,
        max_wait_s: float = 30.0,
    ) -> None:
        self.counters = HandoffCounters()
        self._phase = phase
        self._engine = engine
        self._layout = layout
        self._source = source
        self._transport = transport
        self._clock = clock
        self._commits = commits or CommitClient()
        self._max_wait_s = max_wait_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._handoffs: set[OutgoingHandoff] = set()
        self._is_closing = False

    def add_to_server(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    async def close(self) -> None:
        """Cancel every hand-off, report its end to the phase, and close the channels. Idempotent."""
        self._is_closing = True
        for handoff in tuple(self._handoffs):
            handoff.cancel()
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        await self._commits.close()

    async def Start(  # noqa: N802
        self, request: prefill_pb2.StartRequest, context: _StartContext
    ) -> prefill_pb2.StartReply:
        try:
            generate = convert.request_from_pb(request.request)
            ticket = convert.ticket_from_pb(request.ticket)
            router_id = convert.router_id_from_pb(request.router_id)
            handoff = None if self._phase.is_local(ticket) else self._make_handoff(ticket)
            admitted = asyncio.get_running_loop().create_future()
            # A task of its own: once the phase has the hand-off somebody has to run it, even if the caller has gone by then.
            task = asyncio.create_task(self._serve(generate, ticket, router_id, handoff, admitted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            async with bounded_call(context, self._max_wait_s):
                await wait_shielded(admitted)
        except Refused as refused:
            return prefill_pb2.StartReply(refusal=convert.refusal_to_pb(refused))
        return prefill_pb2.StartReply()

    async def Release(  # noqa: N802
        self, request: prefill_pb2.PrefillReleaseRequest, context: _ReleaseContext
    ) -> prefill_pb2.PrefillReleaseReply:
        try:
            key = convert.key_from_pb(request.key)
        except Refused:
            return prefill_pb2.PrefillReleaseReply()  # names nothing, so there is nothing to release
        async with bounded_call(context, self._max_wait_s):
            await run_between_steps(self._engine, lambda: self._phase.abort(key, request.attempt))
        return prefill_pb2.PrefillReleaseReply()

    def _make_handoff(self, ticket: TransferTicket) -> OutgoingHandoff:
        return OutgoingHandoff(
            ticket=ticket,
            plan=TransferPlan.between(self._layout, ticket.layout),
            source=self._source,
            transport=self._transport,
            committer=self._commits.to(ticket),
            clock=self._clock,
        )

    async def _serve(
        self,
        request: GenerateRequest,
        ticket: TransferTicket,
        router_id: RouterId,
        handoff: OutgoingHandoff | None,
        admitted: asyncio.Future[None],
    ) -> None:
        try:
            is_new = await run_between_steps(self._engine, lambda: self._phase.admit(request, ticket, router_id, handoff))
        except Exception as error:
            admitted.set_exception(error)
            admitted.exception()  # looked at, whether or not the caller still waits
            return
        admitted.set_result(None)
        if is_new and handoff is not None:
            end = await self._run(handoff, ticket)
            self._engine.call(lambda: self._phase.handoff_ended(ticket.key, ticket.attempt, end))

    async def _run(self, handoff: OutgoingHandoff, ticket: TransferTicket) -> TwinpoolError | None:
        """Run the hand-off to its end. Returns why it was not acknowledged, None when it was."""
        running = asyncio.create_task(handoff.run())
        self._handoffs.add(handoff)
        if self._is_closing:  # it was being admitted when the others were cancelled
            handoff.cancel()
        try:
            await asyncio.wait((running,))
        finally:
            self._handoffs.discard(handoff)
        self.counters.num_bytes_sent += handoff.num_bytes_sent
        if running.cancelled():
            self.counters.num_not_acknowledged += 1
            return WorkerLost(f"The hand-off of {ticket.key} attempt {ticket.attempt} was given up.")
        error = running.exception()
        if error is None:
            self._note_acknowledged(handoff, ticket)
            return None
        self.counters.num_not_acknowledged += 1
        if isinstance(error, TwinpoolError):
            return error
        _log.error("The hand-off of %s attempt %d broke.", ticket.key, ticket.attempt, exc_info=error)
        return WorkerLost(f"The hand-off of {ticket.key} attempt {ticket.attempt} broke: {error!r}.")

    def _note_acknowledged(self, handoff: OutgoingHandoff, ticket: TransferTicket) -> None:
        assert handoff.exposed_s is not None
        assert handoff.hidden_fraction is not None
        self.counters.num_acknowledged += 1
        self.counters.transfer_s.observe(handoff.transfer_s)
        self.counters.exposed_s.observe(handoff.exposed_s)
        _log.debug(
            "The hand-off of %s attempt %d sent %d bytes in %.1f ms, %.0f %% of them hidden; from the last chunk to the "
            "acknowledged commit it took %.1f ms.",
            ticket.key,
            ticket.attempt,
            handoff.num_bytes_sent,
            1e3 * handoff.transfer_s,
            100 * handoff.hidden_fraction,
            1e3 * handoff.exposed_s,
        )
