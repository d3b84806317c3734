"""Clients of the HTTP API as the tests need them: streams that can be watched and left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.server_process import MODEL


@dataclass(slots=True, kw_only=True)
class Stream:
    """One streaming completion. It has ended when ``finish_reason`` or ``error`` is set, ``is_done`` once [DONE] came.

    ``began`` is set with the second piece of text: the first may come from prefill, before decode has taken over.
    """

    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    is_done: bool = False
    num_pieces: int = 0
    began: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def http_client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(60), limits=limits) as client:
        yield client


def completion_body(prompt: str, **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, **options}


async def run_stream(client: httpx.AsyncClient, stream: Stream, prompt: str, **options: Any) -> Stream:
    """Read a completion into ``stream`` until it ends, however it ends."""
    body = completion_body(prompt, stream=True, **options)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            stream.error = json.loads(await response.aread())["error"]
            return stream
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                _take(stream, line.removeprefix("data: "))
    return stream


def _take(stream: Stream, data: str) -> None:
    assert not stream.is_done, "something came after [DONE]"
    if data == "[DONE]":
        stream.is_done = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        stream.error = chunk["error"]
        return
    stream.usage = chunk.get("usage") or stream.usage
    for choice in chunk["choices"]:
        stream.text += choice["text"]
        stream.finish_reason = choice["finish_reason"] or stream.finish_reason
        stream.num_pieces += bool(choice["text"])
        if stream.num_pieces == 2:
            stream.began.set()
