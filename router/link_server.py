"""The router's end of the links that workers dial: registration, then events and statuses in, lease renewals out.

1. the worker says Hello;  2. it is welcomed, or refused with one sentence;  3. renewals go out every third of the lease while
its messages are fed into the directory;  4. the stream ends, from either side: the worker is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from router.registered_worker import RegisteredWorker
from router.worker_directory import WorkerDirectory
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import RouterId
from serving_core.rpc.convert import event_from_pb, hello_from_pb, key_to_pb, refusal_to_pb, status_from_pb
from serving_core.rpc.v1 import router_link_pb2, router_link_pb2_grpc
from serving_core.worker_status import PhaseName, WorkerHello

_log = logging.getLogger(__name__)


class LinkServer(router_link_pb2_grpc.RouterLinkServicer):
    """The ``RouterLink`` service of one router.

    Workers must hold ``model_name``, and ``model_print``; without one given, that of the first worker to register. All workers
    of a phase must compute it as the first of them does.
    """

    def __init__(
        self,
        *,
        directory: WorkerDirectory,
        router_id: RouterId,
        model_name: str,
        model_print: str | None,
        lease_s: float,
        hello_timeout_s: float = 5.0,
    ) -> None:
        self._directory = directory
        self._router_id = router_id
        self._model_name = model_name
        self._model_print = model_print
        self._arithmetic: dict[PhaseName, str] = {}
        self._renewal_interval_s = lease_s / 3
        self._hello_timeout_s = hello_timeout_s

    async def Connect(  # noqa: N802 - the name is gRPC's
        self, request_iterator: AsyncIterator[router_link_pb2.WorkerMessage], context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[router_link_pb2.RouterMessage]:
        try:
            worker = await self._take_in(request_iterator)
        except Refused as refused:
            _log.warning("a worker was refused: %s", refused)
            yield router_link_pb2.RouterMessage(refusal=refusal_to_pb(refused))
            return
        reading = asyncio.create_task(self._read(worker, request_iterator))
        try:
            yield router_link_pb2.RouterMessage(welcome=router_link_pb2.Welcome(router_id=self._router_id))
            while not reading.done() and worker.lost_at is None:
                yield _renewal(worker)
                await asyncio.wait(
                    {reading, worker.gone}, timeout=self._renewal_interval_s, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            reading.cancel()
            self._directory.lose(worker)

    async def _take_in(self, messages: AsyncIterator[router_link_pb2.WorkerMessage]) -> RegisteredWorker:
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            raise Refused(RefusalCode.MALFORMED, f"No hello came within {self._hello_timeout_s:g} s.") from None
        if first.WhichOneof("message") != "hello":
            raise Refused(RefusalCode.MALFORMED, f"The first message is {first.WhichOneof('message')} but must be a hello.")
        hello = hello_from_pb(first.hello)
        self._check_model(hello)
        self._check_arithmetic(hello)
        self._check_layout(hello)
        worker = self._directory.register(hello)
        self._model_print = hello.model_print
        self._arithmetic |= {phase: hello.arithmetic(phase) for phase in hello.phases}
        return worker

    async def _read(self, worker: RegisteredWorker, messages: AsyncIterator[router_link_pb2.WorkerMessage]) -> None:
        try:
            async for message in messages:
                if worker.lost_at is not None:
                    return
                match message.WhichOneof("message"):
                    case "step":
                        for event in message.step.events:
                            worker.take_event(event_from_pb(event))
                    case "status":
                        worker.take_status(status_from_pb(message.status))
                    case other:
                        raise Refused(RefusalCode.MALFORMED, f"message {other} after the hello")
        except Refused as refused:
            _log.error("the link of %s is cut: %s", worker.hello.worker_id, refused)
        except (grpc.RpcError, grpc.aio.BaseError) as error:
            _log.debug("the link of %s ended: %s", worker.hello.worker_id, error)
        finally:
            self._directory.lose(worker)

    def _check_model(self, hello: WorkerHello) -> None:
        if hello.model_name != self._model_name:
            raise Refused(
                RefusalCode.MODEL_MISMATCH,
                f"Worker {hello.worker_id} holds model {hello.model_name!r} but this router serves {self._model_name!r}.",
            )
        if self._model_print is not None and hello.model_print != self._model_print:
            raise Refused(
                RefusalCode.MODEL_MISMATCH,
                f"Worker {hello.worker_id} has model print {hello.model_print} but this router serves {self._model_print}.",
            )

    def _check_arithmetic(self, hello: WorkerHello) -> None:
        """A sequence that goes on elsewhere is computed anew: with other kernels, or weights in another form, its keys, values
        and tokens would be others."""
        for phase in hello.phases:
            expected = self._arithmetic.get(phase, hello.arithmetic(phase))
            if hello.arithmetic(phase) != expected:
                raise Refused(
                    RefusalCode.MODEL_MISMATCH,
                    f"Worker {hello.worker_id} computes {phase.value} with {hello.arithmetic(phase)!r} but the others of this "
                    f"router with {expected!r}: all workers of a phase need the same flags. Unlike processors also need "
                    "--enforce-eager; GPUs must be of one kind, with equal versions of torch and of what attends.",
                )

    def _check_layout(self, hello: WorkerHello) -> None:
        """A hand-off may lead from any prefill worker to any decode worker."""
        for other in self._directory.connected():
            if other.hello.worker_id == hello.worker_id or not _can_pair(hello, other.hello):
                continue
            obstacle = hello.layout.obstacle_to(
                other.hello.layout, own_place=f"at {hello.worker_id}", other_place=f"at {other.hello.worker_id}"
            )
            if obstacle:
                raise Refused(
                    RefusalCode.LAYOUT_MISMATCH,
                    f"Worker {hello.worker_id} has KV pages of layout {hello.layout.layout_print}, and nothing converts them "
                    f"for {other.hello.worker_id}, whose layout is {other.hello.layout.layout_print}: {obstacle}.",
                )


def _can_pair(one: WorkerHello, other: WorkerHello) -> bool:
    return any(phase in one.phases and (set(PhaseName) - {phase}) & other.phases for phase in PhaseName)


def _renewal(worker: RegisteredWorker) -> router_link_pb2.RouterMessage:
    keys = [key_to_pb(key) for key in sorted(worker.wanted_keys())]
    return router_link_pb2.RouterMessage(renewal=router_link_pb2.LeaseRenewal(keys=keys))
