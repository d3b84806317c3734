"""The HTTP side on a scripted generator and the default model's tokenizer, without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI

from router.app import create_app
from router.chat_template import ChatTemplate
from serving_core.clock import ManualClock
from serving_core.generate_request import GenerateRequest
from serving_core.token_event import FinishReason
from tests.unit.router.default_model import default_chat_template, default_tokenizer
from tests.unit.router.scripted_generator import RecordedMetrics, Script, ScriptedGenerator

MODEL = "smollm2-135m-instruct"
EOS = 2
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "The sky is"}


def ids_of(text: str) -> list[int]:
    return list(default_tokenizer().encode(text, add_special_tokens=False))


def answering(text: str) -> Script:
    """Plays ``text`` and the end token."""
    return Script(token_ids=[*ids_of(text), EOS])


def cut_after(text: str, num_tokens: int) -> Script:
    """Plays the first tokens of ``text`` and stops for length."""
    return Script(token_ids=ids_of(text)[:num_tokens], finish_reason=FinishReason.LENGTH)


@dataclass
class Front:
    """One application with everything it was given."""

    generator: ScriptedGenerator
    metrics: RecordedMetrics
    app: FastAPI
    clock: ManualClock = field(default_factory=ManualClock)

    @contextlib.asynccontextmanager
    async def client(self, *, raises: bool = True) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=raises)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        async with self.client() as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers=headers)

    async def chat(self, **options: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {**CHAT, **options})

    async def complete(self, **options: Any) -> httpx.Response:
        return await self.post("/v1/completions", {**COMPLETION, **options})

    async def get(self, path: str, **headers: str) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path, headers=headers)


def make_front(
    script: Script | None = None,
    *,
    script_of: Callable[[GenerateRequest], Script] | None = None,
    model_name: str = MODEL,
    max_model_len: int = 512,
    max_total_tokens: int = 10**6,
    chat_template: ChatTemplate | None = None,
    extra_routes: tuple[APIRouter, ...] = (),
    api_key: str | None = None,
    admin_key: str | None = None,
) -> Front:
    generator = ScriptedGenerator(
        script=script or answering("Hello there!"),
        script_of=script_of,
        max_model_len=max_model_len,
        max_total_tokens=max_total_tokens,
    )
    metrics, clock, ids, seeds = RecordedMetrics(), ManualClock(), itertools.count(1), itertools.count(1234)
    app = create_app(
        generator=generator,
        tokenizer=default_tokenizer(),
        chat_template=chat_template or default_chat_template(),
        model_name=model_name,
        metrics=metrics,
        extra_routes=extra_routes,
        api_key=api_key,
        admin_key=admin_key,
        clock=clock,
        unix_time=lambda: 1_700_000_000,
        make_id=lambda: f"{next(ids):04}",
        draw_seed=lambda: next(seeds),
    )
    return Front(generator=generator, metrics=metrics, app=app, clock=clock)


def frames(response: httpx.Response) -> list[str]:
    """The payloads of a stream, each a line of its own between blank lines."""
    *events, rest = response.content.decode("utf-8").split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of a stream that ended well."""
    *payloads, done = frames(response)
    assert done == "[DONE]"
    return [json.loads(payload) for payload in payloads]


def streamed_text(parsed: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in parsed for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices)


class RawClient:
    """One ASGI request driven by hand, to leave at a chosen moment."""

    def __init__(self, app: FastAPI, path: str, body: object) -> None:
        self.sent: list[dict[str, Any]] = []
        self._something_sent = asyncio.Event()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "root_path": "",
        }
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: FastAPI, scope: dict[str, Any]) -> None:
        await app(scope, self._inbox.get, self._send)

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self._something_sent.set()

    async def wait_for_messages(self, num_messages: int) -> None:
        while len(self.sent) < num_messages:
            self._something_sent.clear()
            await self._something_sent.wait()

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})
