from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from serving_core.errors import ConfigError
from twinpool.http_server import HttpServer, listen, url_of


async def hello(scope: dict[str, Any], receive: object, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """An ASGI application that speaks in two parts: at /slow the second never comes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hel", "more_body": True})
    if scope["path"] == "/slow":
        await asyncio.get_running_loop().create_future()
    await send({"type": "http.response.body", "body": b"lo"})


async def test_it_serves_until_it_is_finished() -> None:
    listener = listen("127.0.0.1", 0)
    server = HttpServer(hello, listener)
    running = asyncio.create_task(server.run())
    async with httpx.AsyncClient() as client:
        assert (await client.get(url_of(listener))).text == "hello"
    server.finish()
    async with asyncio.timeout(5):
        await running


async def test_cut_does_not_wait_for_a_response() -> None:
    listener = listen("127.0.0.1", 0)
    server = HttpServer(hello, listener)
    running = asyncio.create_task(server.run())
    async with httpx.AsyncClient() as client, client.stream("GET", f"{url_of(listener)}/slow") as response:
        assert response.status_code == 200
        server.finish()
        done, _ = await asyncio.wait({running}, timeout=0.3)
        assert not done
        server.cut()
        async with asyncio.timeout(5):
            await running


def test_a_port_can_be_had_again_at_once_but_not_twice() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} is taken"):
            listen("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)):
            first.accept()[0].close()  # leaves the port in TIME_WAIT
    with listen("127.0.0.1", port) as again:
        assert url_of(again) == f"http://127.0.0.1:{port}"


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="--host"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1"):
        listen("203.0.113.1", 0)


def test_ipv6_urls_have_brackets() -> None:
    try:
        listener = listen("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with listener:
        assert url_of(listener).startswith("http://[::1]:")
