"""The files of ``--warm-prompt``, read and made tokens of as a request that begins so would be.

A ``.json`` file holds the first messages of a conversation: a list of them, or an object with ``messages``, like the body of a
chat request. Any other file is a text: what a prompt begins with and, where the model's chat template knows system messages,
such a message as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated

from pydantic import Field

from router.chat_messages import Message
from router.prompt_encoder import PromptEncoder
from router.request_body import MAX_BODY_BYTES, RequestBody, check_fields
from serving_core.errors import ConfigError, InvalidRequest

NUM_ANSWER_TOKENS = 2
"""What a warm prompt is answered with: prefill's token and one of decode's, which has the pages then."""

_NEXT_MESSAGES = ("A", "1")
"""Two that have nothing in common: what conversations share that go on with these, all share."""


class _Conversation(RequestBody):
    messages: Annotated[tuple[Message, ...], Field(min_length=1)]


async def read_warm_prompts(
    paths: Sequence[Path], prompts: PromptEncoder, *, max_model_len: int
) -> tuple[tuple[int, ...], ...]:
    """Token ids of the prompts' beginnings, in the files' order and each once. Raises ``ConfigError`` naming the file that
    cannot be read, is empty, or leaves no room for an answer in a window of ``max_model_len``."""
    found: dict[tuple[int, ...], None] = {}
    for path in paths:
        try:
            beginnings = await _beginnings(path, prompts)
        except InvalidRequest as error:
            raise ConfigError(f"--warm-prompt {path} cannot be used: {str(error).rstrip('.')}") from error
        for token_ids in beginnings:
            if len(token_ids) + NUM_ANSWER_TOKENS > max_model_len:
                raise ConfigError(
                    f"--warm-prompt {path} comes to {len(token_ids)} tokens, but must leave room for {NUM_ANSWER_TOKENS} more "
                    f"in a window of {max_model_len}"
                )
            found[token_ids] = None
    return tuple(found)


async def _beginnings(path: Path, prompts: PromptEncoder) -> list[tuple[int, ...]]:
    text = await asyncio.to_thread(_read, path)
    if path.suffix == ".json":
        return [await _chat_beginning(_messages(text, path), prompts)]
    beginnings = [await prompts.encode(text)]
    with contextlib.suppress(InvalidRequest):  # no template, or one that knows no system messages
        beginnings.append(await _chat_beginning((Message(role="system", content=text),), prompts))
    return beginnings


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BODY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--warm-prompt {path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BODY_BYTES:
        raise ConfigError(f"--warm-prompt {path} is larger than {MAX_BODY_BYTES} bytes, which no request may be")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--warm-prompt {path} must be text in UTF-8, but byte {error.start} is not") from error
    if not text.strip():
        raise ConfigError(f"--warm-prompt {path} is empty")
    return text.removesuffix("\n")  # which ends the file's last line, and is none of the prompt


def _messages(text: str, path: Path) -> tuple[Message, ...]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--warm-prompt {path} is not valid JSON: {error}") from error
    return check_fields(value if isinstance(value, dict) else {"messages": value}, _Conversation).messages


async def _chat_beginning(messages: Sequence[Message], prompts: PromptEncoder) -> tuple[int, ...]:
    """The tokens with which every conversation begins that begins with ``messages``. Templates write more around a message than
    its text, and not all of them render one without a user's."""
    if messages[-1].role not in ("system", "developer", "assistant"):
        return await prompts.encode_chat(messages)  # an answer follows
    one, other = [await prompts.encode_chat([*messages, Message(role="user", content=text)]) for text in _NEXT_MESSAGES]
    return tuple(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
