"""A gRPC server whose caller breaks grpcio's own loop."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from serving_core.rpc.channel import make_server, open_channel
from serving_core.rpc.lasting_server import LastingServer
from tests.contract.page_path import until
from tests.fuzz.socket_attacks import grpc_call

SERVICE = "twinpool.v1.Anything"
PATIENCE_S = 5.0


@pytest.fixture(autouse=True)
def no_last_words() -> Iterator[None]:
    """grpcio leaves a task that failed behind, and asyncio says so when it is collected."""
    logging.getLogger("asyncio").disabled = True
    yield
    gc.collect()
    logging.getLogger("asyncio").disabled = False


class Asked:
    """A server with a method that answers when it may, and one channel to it."""

    def __init__(self, server: LastingServer, channel: grpc.aio.Channel, port: int) -> None:
        self.server = server
        self.port = port
        self.may_answer = asyncio.Event()
        self.num_begun = 0
        self._ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/Ask")

    async def answer(self, question: bytes, _context: object) -> bytes:
        self.num_begun += 1
        await self.may_answer.wait()
        return question

    async def ask(self, question: bytes) -> bytes:
        return await self._ask(question, timeout=PATIENCE_S, wait_for_ready=True)

    async def break_it(self) -> None:
        """As anybody can who reaches the port. Returns when there is another one."""
        before = self.server.num_replaced
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(grpc_call(b"/\xba", 0, b""))
        await until(lambda: self.server.num_replaced > before)
        writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[Asked]:
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    channel = open_channel(f"127.0.0.1:{port}")
    asked = Asked(server, channel, port)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(asked.answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Ask": handler}),))
    await server.start()
    try:
        yield asked
    finally:
        await channel.close()
        await server.stop(None)
        await server.stop(None)


async def test_calls_under_way_go_on_and_new_ones_are_served(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as asked:
        under_way = asyncio.create_task(asked.ask(b"first"))
        await until(lambda: asked.num_begun == 1)
        await asked.break_it()
        next_one = asyncio.create_task(asked.ask(b"second"))
        await until(lambda: asked.num_begun == 2)
        asked.may_answer.set()
        assert await under_way == b"first"
        assert await next_one == b"second"
    assert f"gRPC at 127.0.0.1:{asked.port} broke" in caplog.text
    assert "has been started again" in caplog.text


async def test_again_and_again() -> None:
    async with serving() as asked:
        asked.may_answer.set()
        for number in range(4):
            await asked.break_it()
            assert await asked.ask(b"%d" % number) == b"%d" % number
        await until(lambda: not asked.server._broken)


async def test_stopping_ends_what_is_under_way_at_servers_that_broke() -> None:
    async with serving() as asked:
        under_way = asyncio.create_task(asked.ask(b"first"))
        await until(lambda: asked.num_begun == 1)
        await asked.break_it()
        async with asyncio.timeout(PATIENCE_S):
            await asked.server.stop(None)
        with pytest.raises(grpc.aio.AioRpcError):
            await under_way


async def test_it_ends_when_it_is_stopped() -> None:
    async with serving() as asked:
        assert await asked.server.wait_for_termination(0.01)
        ending = asyncio.create_task(asked.server.wait_for_termination())
        await asked.server.stop(None)
        assert not await ending


async def test_another_who_has_taken_the_port_is_waited_for() -> None:
    async with serving() as asked:
        asked.may_answer.set()
        blocker: list[asyncio.Server] = []
        replace_unhindered = LastingServer._replace

        async def replace(server: LastingServer) -> None:
            blocker.append(await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", asked.port))
            freeing = asyncio.get_running_loop().call_later(0.3, blocker[0].close)
            await replace_unhindered(server)
            freeing.cancel()

        asked.server._replace = replace.__get__(asked.server)  # type: ignore[method-assign]
        await asked.break_it()
        assert not blocker[0].is_serving()
        assert await asked.ask(b"?") == b"?"
