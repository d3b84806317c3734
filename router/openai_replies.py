"""The JSON that OpenAI clients get back: whole answers and streamed chunks, for chat and for plain completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer. Every sampled token counts, the end token and the one that completed a stop string too."""

    num_prompt_tokens: int
    num_completion_tokens: int

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
        }


class Reply(Protocol):
    """One kind of completion, seen by the code that sends it."""

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Json:
        """The body of an answer that is not streamed."""

    def opening_chunks(self) -> Sequence[Json]:
        """What a stream begins with, before any text."""

    def text_chunk(self, text: str) -> Json:
        """The next piece of text."""

    def closing_chunk(self, finish_reason: str) -> Json:
        """The only chunk with a finish reason."""

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream that includes usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """What every object of one answer has in common. ``includes_usage`` gives each chunk the key, null but in the last."""

    id: str
    model: str
    created: int
    includes_usage: bool

    def body(self, kind: str, choices: Sequence[Json], usage: Usage) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage.as_json(),
        }

    def chunk(self, kind: str, choices: Sequence[Json], usage: Usage | None = None) -> Json:
        chunk = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return {**chunk, "usage": usage and usage.as_json()} if self.includes_usage else chunk


class ChatReply:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, *, completion_id: str, model: str, created: int, includes_usage: bool) -> None:
        self._frame = _Frame(id=completion_id, model=model, created=created, includes_usage=includes_usage)

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Json:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return self._frame.body("chat.completion", [choice], usage)

    def opening_chunks(self) -> Sequence[Json]:
        return [self._delta({"role": "assistant", "content": ""}, None)]

    def text_chunk(self, text: str) -> Json:
        return self._delta({"content": text}, None)

    def closing_chunk(self, finish_reason: str) -> Json:
        return self._delta({}, finish_reason)

    def usage_chunk(self, usage: Usage) -> Json:
        return self._frame.chunk("chat.completion.chunk", [], usage)

    def _delta(self, delta: Json, finish_reason: str | None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._frame.chunk("chat.completion.chunk", [choice])


class TextReply:
    """text_completion, which is called the same whole and in chunks."""

    def __init__(self, *, completion_id: str, model: str, created: int, includes_usage: bool) -> None:
        self._frame = _Frame(id=completion_id, model=model, created=created, includes_usage=includes_usage)

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Json:
        return self._frame.body("text_completion", [self._choice(text, finish_reason)], usage)

    def opening_chunks(self) -> Sequence[Json]:
        return []

    def text_chunk(self, text: str) -> Json:
        return self._frame.chunk("text_completion", [self._choice(text, None)])

    def closing_chunk(self, finish_reason: str) -> Json:
        return self._frame.chunk("text_completion", [self._choice("", finish_reason)])

    def usage_chunk(self, usage: Usage) -> Json:
        return self._frame.chunk("text_completion", [], usage)

    def _choice(self, text: str, finish_reason: str | None) -> Json:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
