"""A worker's links to the routers it serves: registration, status, events one way, lease renewals the other.

Life of one link, over and over while the worker lives: 1. dial; 2. hello; 3. welcome, or a refusal, which is logged and tried
again; 4. status every second and soon after a change, events as they come; 5. the stream ends, or the router is too far
behind; whatever is unsent is dropped (the router has given the sequences up or its leases run down), a short wait, 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc
import grpc.aio

from serving_core.errors import Refused
from serving_core.ids import RouterId, SequenceKey
from serving_core.rpc.channel import open_channel
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.rpc.convert import event_to_pb, hello_to_pb, key_from_pb, refusal_from_pb, status_to_pb
from serving_core.rpc.v1 import router_link_pb2, router_link_pb2_grpc
from serving_core.token_event import SequenceEvent, TokenEvent
from serving_core.worker_status import WorkerHello, WorkerStatus

STATUS_INTERVAL_S = 1.0
WELCOME_TIMEOUT_S = 5.0
FIRST_BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 2.0
MAX_UNSENT_EVENTS = 100_000
"""A router that is this many events behind is as good as gone; its link is cut, which it notices."""

_log = logging.getLogger(__name__)


class RouterLinks:
    """Every link of one worker; the ``EventSink`` of its phases.

    ``read_status`` takes the worker's status between two engine steps. ``renew`` hands the keys of a renewal to the phases; it
    returns at once. Constructed and run on the asyncio loop; only ``emit`` is called from elsewhere.
    """

    def __init__(
        self,
        *,
        addresses: Sequence[str],
        read_status: Callable[[], Awaitable[WorkerStatus]],
        renew: Callable[[frozenset[SequenceKey]], None],
        token: ClusterToken = OPEN,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._links = [_RouterLink(address, read_status, renew, token) for address in addresses]

    def emit(self, router_id: RouterId, events: Sequence[SequenceEvent]) -> None:
        """See ``EventSink``. Events for a router that is not linked now are dropped."""
        try:
            self._loop.call_soon_threadsafe(self._post, router_id, tuple(events))
        except RuntimeError:
            _log.debug("events dropped: the worker is stopping")

    async def run(self, hello: WorkerHello) -> None:
        """Keep every link up until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for link in self._links:
                tasks.create_task(link.run(hello))

    def _post(self, router_id: RouterId, events: tuple[SequenceEvent, ...]) -> None:
        for link in self._links:
            if link.router_id == router_id:
                link.post(events)


class _RouterLink:
    def __init__(
        self,
        address: str,
        read_status: Callable[[], Awaitable[WorkerStatus]],
        renew: Callable[[frozenset[SequenceKey]], None],
        token: ClusterToken,
    ) -> None:
        self.router_id: RouterId | None = None
        self._token = token
        self._address = address
        self._read_status = read_status
        self._renew = renew
        self._outbox: asyncio.Queue[router_link_pb2.WorkerMessage] = asyncio.Queue()
        self._num_unsent_events = 0
        self._too_far_behind = asyncio.Event()
        self._status_due = asyncio.Event()
        self._status_sent = asyncio.Event()

    def post(self, events: tuple[SequenceEvent, ...]) -> None:
        message = router_link_pb2.WorkerMessage(step=router_link_pb2.StepEvents(events=map(event_to_pb, events)))
        self._outbox.put_nowait(message)
        self._num_unsent_events += len(events)
        if self._num_unsent_events > MAX_UNSENT_EVENTS:
            self._too_far_behind.set()
        if any(_changes_load(event) for event in events):
            self._status_due.set()

    async def run(self, hello: WorkerHello) -> None:
        back_off_s = FIRST_BACK_OFF_S
        while True:
            try:
                await self._connect(hello)
            except (grpc.aio.AioRpcError, TimeoutError, _LinkEnded) as error:
                if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    _log.error("router %s refuses the cluster token of %s: %s", self._address, hello.worker_id, error.details())
                else:
                    _log.debug("link to router %s: %s", self._address, error)
            except Refused as refused:
                _log.error("router %s refused %s: %s", self._address, hello.worker_id, refused)
            was_welcome = self.router_id is not None
            self.router_id = None
            back_off_s = FIRST_BACK_OFF_S if was_welcome else min(2 * back_off_s, MAX_BACK_OFF_S)
            await asyncio.sleep(back_off_s)

    async def _connect(self, hello: WorkerHello) -> None:
        async with open_channel(self._address) as channel:
            call = router_link_pb2_grpc.RouterLinkStub(channel).Connect(metadata=self._token.metadata)
            try:
                async with asyncio.timeout(WELCOME_TIMEOUT_S):
                    await call.write(router_link_pb2.WorkerMessage(hello=hello_to_pb(hello)))
                    self.router_id = _router_id_of(await call.read())
                self._outbox = asyncio.Queue()
                self._num_unsent_events = 0
                self._too_far_behind.clear()
                await self._run_until_any_ends(
                    self._receive(call), self._send(call), self._report_status(), self._end_too_far_behind()
                )
            finally:
                call.cancel()

    async def _run_until_any_ends(self, *parts: Awaitable[None]) -> None:
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, call: _Call) -> None:
        while isinstance(message := await call.read(), router_link_pb2.RouterMessage):
            if message.WhichOneof("message") == "renewal":
                self._renew(frozenset(map(key_from_pb, message.renewal.keys)))
        raise _LinkEnded("the router closed the stream")

    async def _send(self, call: _Call) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await call.write(message)
            except asyncio.InvalidStateError:  # gRPC's word for a stream that the other side has ended
                raise _LinkEnded("the router closed the stream") from None
            self._num_unsent_events -= len(message.step.events)
            if message.WhichOneof("message") == "status":
                self._status_sent.set()

    async def _end_too_far_behind(self) -> None:
        # beside the writing, which a router that reads nothing blocks for as long as it answers pings
        await self._too_far_behind.wait()
        raise _LinkEnded(f"the router is more than {MAX_UNSENT_EVENTS} events behind")

    async def _report_status(self) -> None:
        while True:
            self._status_due.clear()
            status = await self._read_status()
            self._status_sent.clear()
            self._outbox.put_nowait(router_link_pb2.WorkerMessage(status=status_to_pb(status)))
            await self._status_sent.wait()  # the next one is then fresh, and never more than one waits to be sent
            # not wait_for: on Python 3.11 it swallows a cancellation that comes together with the event
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_INTERVAL_S):
                    await self._status_due.wait()


_Call = grpc.aio.StreamStreamCall[router_link_pb2.WorkerMessage, router_link_pb2.RouterMessage]


class _LinkEnded(Exception):
    """The stream is over without gRPC having raised."""


def _router_id_of(answer: router_link_pb2.RouterMessage | object) -> RouterId:
    if not isinstance(answer, router_link_pb2.RouterMessage):
        raise _LinkEnded("the router closed the stream before it answered")
    if answer.WhichOneof("message") == "refusal":
        raise refusal_from_pb(answer.refusal)
    return RouterId(answer.welcome.router_id)


def _changes_load(event: SequenceEvent) -> bool:
    """Whether the router's picture of this worker's queue or pages is out of date after ``event``."""
    return not isinstance(event, TokenEvent) or event.index == 0 or event.finish_reason is not None
