"""Bytes that are no request, and requests that do not arrive, at a real socket."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from twinpool.http_connection import MAX_HEAD_BYTES
from twinpool.http_server import HttpServer, listen

HEAD = b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\n"
GOOD = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LONG = 60.0
"""A time-out that no test waits for."""
SHORT = 0.2


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Answers with the number of bytes of the body: at /read once it is whole, at /early with its head before it is read."""

    async def begin() -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})

    if scope["path"] == "/early":
        await begin()
    num_bytes = 0
    message: dict[str, Any] = {"more_body": scope["path"] != "/unread"}
    while message["more_body"]:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message["body"])
    if scope["path"] != "/early":
        await begin()
    await send({"type": "http.response.body", "body": b"%4d" % num_bytes})


@asynccontextmanager
async def serving(*, request_timeout_s: float = LONG, keep_alive_s: int = 60) -> AsyncIterator[tuple[str, int]]:
    """Where a server listens."""
    listener = listen("127.0.0.1", 0)
    server = HttpServer(app, listener, request_timeout_s=request_timeout_s, keep_alive_s=keep_alive_s)
    running = asyncio.create_task(server.run())
    try:
        async with asyncio.timeout(20):
            yield listener.getsockname()
    finally:
        server.cut()
        await running


@asynccontextmanager
async def client(
    *, request_timeout_s: float = LONG, keep_alive_s: int = 60
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of its own."""
    async with serving(request_timeout_s=request_timeout_s, keep_alive_s=keep_alive_s) as address:
        reader, writer = await asyncio.open_connection(*address)
        yield reader, writer
        writer.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of one response."""
    head = await reader.readuntil(b"\r\n\r\n")
    status_line, *lines = head.strip().split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    return int(status_line.split()[1]), headers, await reader.readexactly(int(headers[b"content-length"]))


async def error_of(reader: asyncio.StreamReader, status: int) -> dict[str, Any]:
    """The one response with this error, after which the connection ends."""
    answered, headers, body = await answer_of(reader)
    assert (answered, headers[b"content-type"], headers[b"connection"]) == (status, b"application/json", b"close")
    assert await reader.read() == b""
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "overloaded_error")
    return error


@pytest.mark.parametrize(
    "sent",
    [
        b"this is no request\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/1.1\r\nhost x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET / HTTP/1.1\r\nhost: x\r\nname: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nname: " + b"a" * MAX_HEAD_BYTES,
        HEAD + b"content-length: many\r\n\r\n",
        HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nnothing\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n",
        HEAD + b"transfer-encoding: gzip\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_told_so_in_json(sent: bytes) -> None:
    async with client() as (reader, writer):
        writer.write(sent)
        error = await error_of(reader, 400)
        assert error["code"] == "invalid_http"
        assert "not valid HTTP/1.1" in error["message"]


async def test_an_answer_that_has_begun_is_cut_off_by_a_broken_body(caplog: pytest.LogCaptureFixture) -> None:
    async with client() as (reader, writer):
        writer.write(HEAD.replace(b"/read", b"/early") + b"transfer-encoding: chunked\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"nothing\r\n")
        assert await reader.read() == b""
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []


async def test_what_the_application_answers_to_a_broken_body_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with client() as (reader, writer):
        writer.write(HEAD.replace(b"/read", b"/unread") + b"transfer-encoding: chunked\r\n\r\nnothing\r\n")
        assert (await error_of(reader, 400))["code"] == "invalid_http"
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []


async def test_a_head_request_gets_no_body_with_its_error() -> None:
    async with client() as (reader, writer):
        writer.write(HEAD.replace(b"POST", b"HEAD") + b"transfer-encoding: chunked\r\n\r\nnothing\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"G",
        b"POST /read HTTP/1.1\r\nhost: x\r\n",
        HEAD + b"content-length: 5\r\n\r\n1234",
        HEAD + b"transfer-encoding: chunked\r\n\r\n4\r\n1234\r\n",
    ],
)
async def test_a_request_that_does_not_become_whole_is_given_up(sent: bytes) -> None:
    async with client(request_timeout_s=SHORT) as (reader, writer):
        writer.write(sent)
        error = await error_of(reader, 408)
        assert error["code"] == "request_timeout"
        assert error["message"] == "The request was not complete 0.2 s after its first byte."


async def test_single_bytes_do_not_prolong_the_time() -> None:
    async with client(request_timeout_s=SHORT) as (reader, writer):
        answer = asyncio.create_task(error_of(reader, 408))
        writer.write(HEAD)
        while not answer.done():
            if not writer.is_closing():
                writer.write(b"x")
            await asyncio.wait({answer}, timeout=SHORT / 10)
        assert answer.result()["code"] == "request_timeout"


async def test_an_answer_that_has_begun_is_cut_off_by_a_body_that_does_not_come() -> None:
    async with client(request_timeout_s=SHORT) as (reader, writer):
        writer.write(HEAD.replace(b"/read", b"/early") + b"content-length: 5\r\n\r\n1234")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.read() == b""


async def test_the_rest_of_a_body_that_was_answered_has_no_more_time() -> None:
    async with client(request_timeout_s=SHORT) as (reader, writer):
        writer.write(HEAD.replace(b"/read", b"/unread") + b"content-length: 5\r\n\r\n1234")
        assert (await answer_of(reader))[0] == 200
        assert await reader.read() == b""


async def test_each_request_of_a_connection_has_its_own_time() -> None:
    async with client(request_timeout_s=1.5) as (reader, writer):
        for _ in range(5):
            writer.write(HEAD + b"content-length: 5\r\n\r\n1234")
            await asyncio.sleep(0.4)
            writer.write(b"5")
            status, _, body = await answer_of(reader)
            assert (status, body) == (200, b"   5")


async def test_a_pause_between_two_requests_is_no_slow_request() -> None:
    async with client(request_timeout_s=SHORT) as (reader, writer):
        for sent in (GOOD, GOOD, HEAD.replace(b"/read", b"/unread") + b"content-length: 5\r\n\r\n12345", GOOD):
            writer.write(sent)
            assert (await answer_of(reader))[0] == 200
            await asyncio.sleep(2 * SHORT)


@pytest.mark.parametrize("part", [GOOD[:-2], HEAD + b"content-length: 5\r\n\r\n1234"])
async def test_a_request_that_came_behind_another_one_is_given_up(part: bytes) -> None:
    async with client(request_timeout_s=SHORT) as (reader, writer):
        writer.write(GOOD + part)
        assert (await answer_of(reader))[0] == 200
        assert (await error_of(reader, 408))["code"] == "request_timeout"


@pytest.mark.parametrize(
    ("part", "rest"), [(GOOD[:-2], GOOD[-2:]), (HEAD + b"content-length: 5\r\n\r\n1234", b"5")], ids=["head", "body"]
)
async def test_a_request_in_one_packet_with_the_end_of_the_one_before_has_its_own_time(part: bytes, rest: bytes) -> None:
    async with client(request_timeout_s=1.5) as (reader, writer):
        # 1. a request is answered before its body is whole
        writer.write(HEAD.replace(b"/read", b"/unread") + b"content-length: 5\r\n\r\n1234")
        assert (await answer_of(reader))[0] == 200
        # 2. late, the end of the body comes, and a part of the next request with it
        await asyncio.sleep(1.0)
        writer.write(b"5" + part)
        # 3. the rest of that comes when the first one's time is over
        await asyncio.sleep(1.0)
        writer.write(rest)
        assert (await answer_of(reader))[0] == 200


@pytest.mark.parametrize("part", [GOOD[:-2], HEAD + b"content-length: 5\r\n\r\n1234"])
async def test_a_server_that_stops_does_not_wait_for_the_rest_of_a_request(
    part: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    listener = listen("127.0.0.1", 0)
    server = HttpServer(app, listener)
    running = asyncio.create_task(server.run())
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(GOOD + part)
        assert (await answer_of(reader))[0] == 200
        server.finish()
        assert (await error_of(reader, 503))["message"] == "The request was not complete when the server stopped."
        writer.close()
        await running
    assert caplog.records == []


@pytest.mark.parametrize(
    "sent", [b"this is no request\r\n\r\n", GOOD[:-2] + b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"]
)
async def test_strangers_cannot_fill_the_log(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with client() as (reader, writer):
        writer.write(sent)
        assert (await reader.read()).startswith(b"HTTP/1.1 ")
    assert caplog.records == []


@pytest.mark.parametrize("sent", [b"", GOOD])
async def test_an_idle_connection_closes_without_a_word(sent: bytes) -> None:
    async with client(keep_alive_s=1) as (reader, writer):
        writer.write(sent)
        if sent:
            assert (await answer_of(reader))[0] == 200
        assert await reader.read() == b""


async def test_random_bytes_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    numbers = random.Random(5)
    good = HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    async with serving(request_timeout_s=SHORT, keep_alive_s=1) as address:

        async def send_noise(noise: bytes) -> None:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(noise)
            answer = await reader.read()
            assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
            writer.close()

        async with asyncio.TaskGroup() as senders:
            for _ in range(100):
                noise, at = numbers.randbytes(numbers.randrange(1, 200)), numbers.randrange(len(good))
                bodies = (noise, good[:at], good[:at] + noise, good[:at] + noise + good[at:])
                senders.create_task(send_noise(numbers.choice(bodies)))
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []
