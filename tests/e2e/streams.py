"""Clients of the HTTP API as the tests need them: streams that can be watched and left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.server_process import MODEL


@dataclass(slots=True, kw_only=True)
class Stream:
    """One streaming answer. It has ended when ``finish_reason`` or ``error`` is set, ``is_done`` once [DONE] came.

    ``began`` is set with the second piece of text: the first may come from prefill, before decode has taken over.
    ``logprobs``: each token's text, its log probability and those of the likeliest tokens.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    is_done: bool = False
    num_pieces: int = 0
    is_open: bool = False
    began: asyncio.Event = field(default_factory=asyncio.Event)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_tokens(self) -> int:
        """Those that came with their ids or log probabilities."""
        return max(len(self.token_ids), len(self.logprobs))

    async def reach(self, num_tokens: int) -> None:
        """Until the server has taken the request and so many tokens have come, or it has ended without them."""
        while not (self.is_open and self.num_tokens >= num_tokens) and not (self.finish_reason or self.error):
            self._news.clear()
            await self._news.wait()

    def tell(self) -> None:
        """Something has come."""
        self._news.set()


@asynccontextmanager
async def http_client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(60), limits=limits) as client:
        yield client


def completion_body(prompt: str | Sequence[int], **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, **options}


async def run_stream(client: httpx.AsyncClient, stream: Stream, prompt: str | Sequence[int], **options: Any) -> Stream:
    """Read a completion into ``stream`` until it ends, however it ends."""
    return await _run(client, stream, "/v1/completions", completion_body(prompt, stream=True, **options))


async def run_generation(client: httpx.AsyncClient, stream: Stream, prompt: str | Sequence[int], **options: Any) -> Stream:
    """The same of /generate, with token ids."""
    return await _run(client, stream, "/generate", completion_body(prompt, stream=True, **options))


async def _run(client: httpx.AsyncClient, stream: Stream, path: str, body: dict[str, Any]) -> Stream:
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            stream.error = json.loads(await response.aread())["error"]
            stream.tell()
            return stream
        stream.is_open = True
        stream.tell()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                _take(stream, line.removeprefix("data: "))
                stream.tell()
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
    for choice in chunk.get("choices", [chunk]):  # /generate has one answer, and no list around it
        stream.text += choice["text"]
        stream.token_ids += choice.get("token_ids", ())
        if logprobs := choice.get("logprobs"):
            stream.logprobs += zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        stream.finish_reason = choice["finish_reason"] or stream.finish_reason
        stream.num_pieces += bool(choice["text"])
        if stream.num_pieces == 2:
            stream.began.set()
