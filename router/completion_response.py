"""Sends the answers to one request, streamed or whole, and stops them when the client leaves. Knows no workers.

1. Every choice is begun and the first token of any is awaited; a failure until then is an ordinary error response.
2. Headers, then chunks or the whole body. A failure after the headers is one ``error`` event, without ``[DONE]`` after it.
3. Whatever happens, leaving ``_send_answer`` releases every choice: finished, failed, cancelled, or the client gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Mapping

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.answer import AnswerToken, Piece
from router.choices import ChoicePart, Choices
from router.http_errors import http_error
from router.reply import ChoiceText, Reply, Usage
from router.sse import DONE, STREAM_HEADERS, json_frame, raw_frame
from serving_core.errors import TwinpoolError

_log = logging.getLogger(__name__)


class CompletionResponse(Response):
    """A response that makes its answer while it is sent. ``num_prompt_tokens``: of all prompts together. Each prompt has
    ``num_choices`` of the choices, in order."""

    def __init__(
        self,
        *,
        choices: Choices,
        reply: Reply,
        num_prompt_tokens: int,
        num_choices: int = 1,
        is_stream: bool,
        includes_usage: bool,
    ) -> None:
        self._choices = choices
        self._reply = reply
        self._num_prompt_tokens = num_prompt_tokens
        self._num_choices = num_choices
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0
        self._is_stream = is_stream
        self._includes_usage = includes_usage
        self.background = None  # what a framework looks at in any response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _run_while_connected(receive, self._send_answer(send))

    async def _send_answer(self, send: Send) -> None:
        async with self._choices:
            if self._is_stream:
                await self._send_stream(send)
            else:
                await self._send_whole(send)

    async def _send_whole(self, send: Send) -> None:
        drafts = [_Draft(index) for index in range(len(self._choices))]
        while (part := await self._next_part()) is not None:
            drafts[part.index].add(part.piece)
        value = self._reply.whole([(draft.take(), draft.finish_reason) for draft in drafts], self._usage)
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await send(self._start_message(headers))
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send) -> None:
        part = await self._next_part()
        await send(self._start_message(STREAM_HEADERS))
        try:
            for chunk in self._reply.opening_chunks(len(self._choices)):
                await _send_frame(send, json_frame(chunk))
            drafts = [_Draft(index) for index in range(len(self._choices))]
            while part is not None:
                draft = drafts[part.index]
                draft.add(part.piece)
                if part.piece.text:
                    await _send_frame(send, json_frame(self._reply.text_chunk(draft.take())))
                if part.piece.finish_reason is not None:
                    chunk = self._reply.closing_chunk(draft.take(), draft.finish_reason, self._usage)
                    await _send_frame(send, json_frame(chunk))
                part = await self._next_part()
            if self._includes_usage:
                await _send_frame(send, json_frame(self._reply.usage_chunk(self._usage)))
            last_frame = DONE
        except Exception as error:
            if not isinstance(error, TwinpoolError):
                _log.exception("A stream ended with an error nobody expected.")
            last_frame = raw_frame(http_error(error).body)
        await _send_frame(send, last_frame, is_last=True)

    async def _next_part(self) -> ChoicePart | None:
        part = await self._choices.next_part()
        if part is not None:
            self._num_completion_tokens += 1
            if part.index % self._num_choices == 0:
                self._num_cached_tokens += part.piece.num_cached_tokens
        return part

    @property
    def _usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=self._num_completion_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )

    def _start_message(self, headers: Mapping[str, str]) -> Message:
        all_headers = {
            **headers,
            "x-twinpool-path": self._choices.path.value,
            "x-twinpool-reason": self._choices.reason,
        }
        raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw_headers}


class _Draft:
    """What has come of one choice and has not been sent. Tokens wait for the text they belong to."""

    def __init__(self, index: int) -> None:
        self.finish_reason = ""
        self._index = index
        self._texts: list[str] = []
        self._tokens: list[AnswerToken] = []

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._tokens.append(piece.token)
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason.value

    def take(self) -> ChoiceText:
        """All of it, to be sent now."""
        taken = ChoiceText(index=self._index, text="".join(self._texts), tokens=self._tokens)
        self._texts, self._tokens = [], []
        return taken


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
