"""On every TCP port: bytes that are no HTTP/2, no HTTP/1.1 and no JSON, connections of which only half is there, and lengths
that nobody could have."""

from __future__ import annotations

import asyncio
import random
import re
import struct
from collections.abc import Sequence
from typing import Any

from tests.contract.page_path import until
from tests.fuzz.noise import EDGES, EIGHT_GIB, spoil_bytes, spoil_json
from tests.fuzz.target import Target, hang_up

ANSWER_S = 1.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS = 4
MESSAGES = [{"role": "user", "content": "Hi"}]
OPTIONS: dict[str, Any] = {"max_tokens": 2, "temperature": 0.5, "top_k": 3, "seed": 1, "stream": False, "stop": ["x"]}
POSTED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "n": 1, "logprobs": 1, **OPTIONS},
    "/v1/chat/completions": {"messages": MESSAGES, **OPTIONS},
    "/generate": {"prompt": [5, 6, 7], **OPTIONS},
    "/tokenize": {"prompt": "Hi", "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6, 7]},
}
METHODS = ("GET", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE", "x" * 300)
GOTTEN = (
    "/health",
    "/ready",
    "/metrics",
    "/v1/models",
    "/v1/models/..%2f..",
    "/admin/workers",
    "/admin/pages?summary=1",
    "/%00",
)


async def bad_bytes(target: Target, chance: random.Random) -> None:
    """To any port of the process: noise, another protocol, HTTP/2 that is wrong, or nothing at all."""
    await _talk(target, chance.choice(target.listening_ports()), _draw_bytes(target, chance), chance)


async def bad_http(target: Target, chance: random.Random) -> None:
    """To the HTTP port: a request with a wrong byte, head, length, chunk or body."""
    answer = await _talk(target, target.http_port, _draw_request(chance), chance)
    for status in re.findall(rb"^HTTP/1\.1 (\d+)", answer, re.MULTILINE):
        assert int(status) < 500 or status == b"503", answer[:2000]


async def bad_method(target: Target, chance: random.Random) -> None:
    """A gRPC call whose method is no UTF-8, which breaks gRPC's own server: there is another one at once."""
    address, server = chance.choice(list(target.grpc_servers.items()))
    before = server.num_replaced
    method = b"/" + chance.randbytes(chance.randrange(20)) + b"\xff"
    port = int(address.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(grpc_call(method, 0, b""))
        await until(lambda: server.num_replaced > before)
    finally:
        hang_up(writer)


def _draw_bytes(target: Target, chance: random.Random) -> list[bytes]:
    match chance.randrange(6):
        case 0:
            return []
        case 1:
            return [chance.randbytes(chance.choice((1, 8, 9, 64, 70_000)))]
        case 2:
            return [chance.choice((TLS_HELLO, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\0" * 4096, PREFACE[:10]))]
        case 3:
            return [PREFACE, *(_noise_frame(chance) for _ in range(chance.randrange(8)))]
        case 4:
            return [spoil_bytes(chance, grpc_call(b"/twinpool.v1.Decode/Reserve", chance.choice(EDGES), b"\x0a\x03abc"))]
        case _:
            method = chance.choice(
                (b"/twinpool.kv.v1.PagePath/Write", b"/twinpool.kv.v1.PagePair/Open", b"/twinpool.v1.Worker/GetPages")
            )
            return [grpc_call(method, chance.choice((*EDGES, 2**32 - 1)), chance.randbytes(chance.randrange(200)))]


def _noise_frame(chance: random.Random) -> bytes:
    payload = chance.randbytes(chance.randrange(100))
    return http2_frame(
        chance.randrange(12), chance.randrange(256), chance.choice(EDGES), payload, chance.choice((0, 0, 1, 2**23))
    )


def http2_frame(kind: int, flags: int, stream: int, payload: bytes, num_more: int = 0) -> bytes:
    """Of RFC 9113, section 4.1, claiming ``num_more`` bytes than there are."""
    length = min(len(payload) + num_more, 2**24 - 1)
    return struct.pack(">I", length)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def grpc_call(method: bytes, claimed_bytes: int, message: bytes) -> bytes:
    """A gRPC call by hand, whose one message claims to have so many bytes (4 bytes hold the number)."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": method,
        b":authority": b"x",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    head = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields.items())
    data = b"\0" + struct.pack(">I", claimed_bytes) + message
    return PREFACE + b"".join(
        (
            http2_frame(SETTINGS, 0, 0, b""),
            http2_frame(HEADERS, END_HEADERS, 1, head),
            http2_frame(DATA, 0, 1, data),
        )
    )


def http_request(method: str, path: str, headers: Sequence[str], body: bytes) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "host: x", *headers, "", "")).encode() + body


def _draw_request(chance: random.Random) -> list[bytes]:
    path = chance.choice(list(POSTED))
    body = spoil_json(chance, POSTED[path])
    length = f"content-length: {len(body)}"
    match chance.randrange(10):
        case 0 | 1 | 2 | 3:
            return [http_request("POST", path, (length,), body)]
        case 4:
            return [spoil_bytes(chance, http_request("POST", path, (length,), body))]
        case 5:
            claimed = chance.choice((len(body) + 1, 0, 2**63, EIGHT_GIB, -1, "0x10", f"{len(body)}, {len(body)}"))
            return [http_request("POST", path, (f"content-length: {claimed}",), body)]
        case 6:
            size = chance.choice((b"%x" % len(body), b"%x" % EIGHT_GIB, b"-1", b"", b"zz", b"f" * 40))
            chunk = size + b"\r\n" + body + b"\r\n"
            ending = chance.choice((b"0\r\n\r\n", b"", b"0\r\nx: y\r\n\r\n"))
            return [http_request("POST", path, ("transfer-encoding: chunked",), b""), chunk, ending]
        case 7 | 8:
            return _draw_odd_heads(chance, path)
        case _:
            nested = chance.choice((b"[" * 100_000, b'{"prompt":' * 5000, b'{"n":' + b"9" * 6000 + b"}", b"\xff\xfe" * 50))
            return [http_request("POST", path, (f"content-length: {len(nested)}",), nested)]


def _draw_odd_heads(chance: random.Random, path: str) -> list[bytes]:
    if chance.random() < 0.5:
        return [http_request(chance.choice(METHODS), chance.choice((*POSTED, *GOTTEN, "/" + "x" * 10_000)), (), b"")] * 3
    odd = chance.choice(
        ("x: " + "y" * 20_000, "x" * 70_000, "x: \0", " x: y", "x y: z", "expect: 100-continue", "upgrade: h2c")
    )
    return [http_request(chance.choice(("GET", "POST", "HEAD")), path, (odd, *["a: b"] * chance.choice((0, 3000))), b"")]


async def _talk(target: Target, port: int, pieces: Sequence[bytes], chance: random.Random) -> bytes:
    """Send the pieces; what was answered. The connection ends in order, at once, or not at all."""
    answer = b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:  # torch.distributed has closed it meanwhile
        return answer
    end = chance.randrange(4)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        if end == 0:
            writer.write_eof()
        if end <= 1:
            async with asyncio.timeout(ANSWER_S):
                while more := await reader.read(1 << 16):
                    answer = (answer + more)[: 1 << 20]
    except (OSError, TimeoutError):
        pass
    finally:
        if end <= 2:
            hang_up(writer)
        else:
            target.keep_open(writer)
    return answer
