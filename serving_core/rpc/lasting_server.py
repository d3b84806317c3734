"""A gRPC server that outlives what breaks it.

grpcio's server on asyncio decodes the method of every call in its own loop, before any interceptor. A method that is no UTF-8,
which anybody can send, ends that loop, and with it the listening: calls under way go on, new ones find nobody. Seen with grpcio
1.85.3. Nothing in front of that loop can be ours, so another server takes its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

POLL_S = 0.1
"""Until a broken server is noticed, and between tries to listen where it did."""

_log = logging.getLogger(__name__)


class LastingServer(grpc.aio.Server):
    """Servers of ``make``, one after another, with the same services at the same ports. Lives on one event loop.

    One that breaks is replaced within about ``POLL_S``. It ends once the last of its calls has.
    """

    def __init__(self, make: Callable[[], grpc.aio.Server]) -> None:
        self._make = make
        self._server = make()
        self._add_services: list[Callable[[grpc.aio.Server], None]] = []
        self._addresses: list[str] = []
        self._num_replaced = 0
        self._watch: asyncio.Task[None] | None = None
        self._broken: dict[asyncio.Task[None], grpc.aio.Server] = {}  # by what waits for their ends

    @property
    def num_replaced(self) -> int:
        """Servers that broke and have a successor. Only grows."""
        return self._num_replaced

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Before the start only."""
        handlers = tuple(generic_rpc_handlers)
        self._add(lambda server: server.add_generic_rpc_handlers(handlers))

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Nothing: generated code adds the same methods as generic ones as well. For each registered one grpcio keeps memory at
        hand into which its core writes the next call. A loop that breaks frees that memory, and the core writes nonetheless."""

    def add_insecure_port(self, address: str) -> int:
        """The port, where ``address`` leaves it open. Raises ``RuntimeError`` when it is taken. Before the start only."""
        port = self._server.add_insecure_port(address)
        self._addresses.append(f"{address.removesuffix('0')}{port}" if address.endswith(":0") else address)
        return port

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """There is none."""
        raise NotImplementedError

    async def start(self) -> None:
        """Once only."""
        await self._server.start()
        self._watch = asyncio.create_task(self._outlive())

    async def discard(self) -> None:
        """The end of one that was never started."""
        await _discard(self._server)

    async def stop(self, grace: float | None) -> None:
        """Listen no more, give calls ``grace`` seconds to end and cancel what is left. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait((self._watch,))
        endings = tuple(self._broken)
        await asyncio.gather(*(server.stop(grace) for server in (self._server, *self._broken.values())))
        await asyncio.gather(*endings)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Until it was stopped. True when that takes longer than ``timeout`` seconds."""
        if self._watch is not None:
            await asyncio.wait((self._watch,), timeout=timeout)
        return self._watch is not None and not self._watch.done()

    def _add(self, add_service: Callable[[grpc.aio.Server], None]) -> None:
        add_service(self._server)
        self._add_services.append(add_service)

    async def _outlive(self) -> None:
        while True:
            try:
                await self._server.wait_for_termination(POLL_S)  # when it has ended by itself, this raises why
            except Exception as error:
                ending = asyncio.create_task(_end(self._server))
                self._broken[ending] = self._server
                ending.add_done_callback(self._broken.pop)
                await self._replace()
                self._num_replaced += 1
                _log.warning("gRPC at %s broke (%s) and has been started again.", ", ".join(self._addresses), error)

    async def _replace(self) -> None:
        while True:
            server = self._make()
            for add_service in self._add_services:
                add_service(server)
            try:
                for address in self._addresses:
                    server.add_insecure_port(address)
            except RuntimeError:
                await asyncio.shield(_discard(server))  # the broken one has not let go of the port yet
                await asyncio.sleep(POLL_S)
            else:
                self._server = server
                await server.start()
                return


async def _discard(server: grpc.aio.Server) -> None:
    await server.start()  # gRPC stops only what was started, and complains at exit of what was not stopped
    await server.stop(None)


async def _end(broken: grpc.aio.Server) -> None:
    """Give up what it holds, once its last call has ended."""
    with suppress(Exception):
        await broken.wait_for_termination()  # raises what broke it
    await broken.stop(None)
