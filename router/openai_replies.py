"""The JSON that OpenAI clients get back: whole answers and streamed chunks, for chat and for plain completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.logprob_report import LogprobReport
from router.reply import ChoiceText, Json, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFrame:
    """What every object of one answer has in common. ``includes_usage`` gives each chunk the key, null but in the last.
    ``logprobs`` is None where the client wants none."""

    id: str
    model: str
    created: int
    includes_usage: bool
    logprobs: LogprobReport | None

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

    def __init__(self, frame: ReplyFrame) -> None:
        self._frame = frame

    def whole(self, choices: Sequence[tuple[ChoiceText, str]], usage: Usage) -> Json:
        bodies = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": self._logprobs(choice),
                "finish_reason": finish_reason,
            }
            for choice, finish_reason in choices
        ]
        return self._frame.body("chat.completion", bodies, usage)

    def opening_chunks(self, num_choices: int) -> Sequence[Json]:
        return [self._delta(index, {"role": "assistant", "content": ""}) for index in range(num_choices)]

    def text_chunk(self, choice: ChoiceText) -> Json:
        return self._delta(choice.index, {"content": choice.text}, logprobs=self._logprobs(choice))

    def closing_chunk(self, choice: ChoiceText, finish_reason: str, usage: Usage) -> Json:
        logprobs = self._logprobs(choice) if choice.tokens else None
        return self._delta(choice.index, {}, logprobs=logprobs, finish_reason=finish_reason)

    def usage_chunk(self, usage: Usage) -> Json:
        return self._frame.chunk("chat.completion.chunk", [], usage)

    def _delta(self, index: int, delta: Json, *, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._frame.chunk("chat.completion.chunk", [choice])

    def _logprobs(self, choice: ChoiceText) -> Json | None:
        return self._frame.logprobs.of_chat(choice.tokens) if self._frame.logprobs else None


class TextReply:
    """text_completion, which is called the same whole and in chunks. ``echoes[i]`` is put in front of choice i."""

    def __init__(self, frame: ReplyFrame, *, echoes: Sequence[str] = ()) -> None:
        self._frame = frame
        self._echoes = echoes

    def whole(self, choices: Sequence[tuple[ChoiceText, str]], usage: Usage) -> Json:
        echoes = self._echoes or [""] * len(choices)
        bodies = [
            self._choice(choice.index, echo + choice.text, logprobs=self._logprobs(choice), finish_reason=finish_reason)
            for echo, (choice, finish_reason) in zip(echoes, choices, strict=True)
        ]
        return self._frame.body("text_completion", bodies, usage)

    def opening_chunks(self, num_choices: int) -> Sequence[Json]:
        return [self._frame.chunk("text_completion", [self._choice(*echo)]) for echo in enumerate(self._echoes)]

    def text_chunk(self, choice: ChoiceText) -> Json:
        body = self._choice(choice.index, choice.text, logprobs=self._logprobs(choice))
        return self._frame.chunk("text_completion", [body])

    def closing_chunk(self, choice: ChoiceText, finish_reason: str, usage: Usage) -> Json:
        logprobs = self._logprobs(choice) if choice.tokens else None
        body = self._choice(choice.index, "", logprobs=logprobs, finish_reason=finish_reason)
        return self._frame.chunk("text_completion", [body])

    def usage_chunk(self, usage: Usage) -> Json:
        return self._frame.chunk("text_completion", [], usage)

    def _choice(self, index: int, text: str, *, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, choice: ChoiceText) -> Json | None:
        return self._frame.logprobs.of_text(choice.tokens) if self._frame.logprobs else None
