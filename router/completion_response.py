"""Sends one answer, streamed or whole, and stops it when the client leaves. Knows no tokens and no workers.

1. The generation starts and its first token is awaited; a failure until then is an ordinary error response.
2. Headers, then chunks or the whole body. A failure after the headers is one ``error`` event, without ``[DONE]`` after it.
3. Whatever happens, leaving ``_send_answer`` releases the generation: finished, failed, cancelled, or the client gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.answer import Answer
from router.http_errors import http_error
from router.openai_replies import Reply
from router.sse import DONE, STREAM_HEADERS, json_frame, raw_frame
from serving_core.errors import TwinpoolError

_log = logging.getLogger(__name__)


class CompletionResponse(Response):
    """A response that makes its answer while it is sent. ``start`` admits and places the request; called once."""

    def __init__(self, *, start: Callable[[], Awaitable[Answer]], reply: Reply, is_stream: bool, includes_usage: bool) -> None:
        self._start = start
        self._reply = reply
        self._is_stream = is_stream
        self._includes_usage = includes_usage
        self.background = None  # what a framework looks at in any response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _run_while_connected(receive, self._send_answer(send))

    async def _send_answer(self, send: Send) -> None:
        async with await self._start() as answer:
            if self._is_stream:
                await self._send_stream(answer, send)
            else:
                await self._send_whole(answer, send)

    async def _send_whole(self, answer: Answer, send: Send) -> None:
        pieces: list[str] = []
        while (piece := await answer.next_piece()) is not None:
            pieces.append(piece)
        assert answer.finish_reason is not None
        value = self._reply.whole("".join(pieces), answer.finish_reason.value, answer.usage)
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await send(_start_message(headers, answer))
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, answer: Answer, send: Send) -> None:
        piece = await answer.next_piece()
        await send(_start_message(STREAM_HEADERS, answer))
        try:
            for chunk in self._reply.opening_chunks():
                await _send_frame(send, json_frame(chunk))
            while piece is not None:
                if piece:
                    await _send_frame(send, json_frame(self._reply.text_chunk(piece)))
                piece = await answer.next_piece()
            assert answer.finish_reason is not None
            await _send_frame(send, json_frame(self._reply.closing_chunk(answer.finish_reason.value)))
            if self._includes_usage:
                await _send_frame(send, json_frame(self._reply.usage_chunk(answer.usage)))
            last_frame = DONE
        except Exception as error:
            if not isinstance(error, TwinpoolError):
                _log.exception("A stream ended with an error nobody expected.")
            last_frame = raw_frame(http_error(error).body)
        await _send_frame(send, last_frame, is_last=True)


def _start_message(headers: Mapping[str, str], answer: Answer) -> Message:
    all_headers = {**headers, "x-twinpool-path": answer.path.value, "x-twinpool-reason": answer.reason}
    raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw_headers}


async def _send_frame(send: Send, frame: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": frame, "more_body": not is_last})


async def _run_while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run ``work`` to its end, or cancel it when the client leaves; either way it has ended on return."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_client_left(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.wait((task, watcher))
    if not task.cancelled():
        task.result()


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
