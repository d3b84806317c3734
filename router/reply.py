"""What every kind of reply has in common: its parts, its usage, and the seam to the code that sends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.answer import AnswerToken

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request: each prompt once, and every sampled token of every choice, the end token and the one that
    completed a stop string too. ``num_cached_tokens`` of the prompts were not computed, since their keys and values were there
    before; of several answers to a prompt the first one's count."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceText:
    """A stretch of one choice: its text and its tokens, whole or since the chunk before."""

    index: int
    text: str
    tokens: Sequence[AnswerToken]


class Reply(Protocol):
    """One kind of reply, seen by the code that sends it. ``finish_reason`` is OpenAI's word."""

    def whole(self, choices: Sequence[tuple[ChoiceText, str]], usage: Usage) -> Json:
        """The body of an answer that is not streamed, of choices in order with their finish reasons."""

    def opening_chunks(self, num_choices: int) -> Sequence[Json]:
        """What a stream begins with, before any text."""

    def text_chunk(self, choice: ChoiceText) -> Json:
        """The next piece of one choice."""

    def closing_chunk(self, choice: ChoiceText, finish_reason: str, usage: Usage) -> Json:
        """The only chunk of a choice with a finish reason. ``choice`` has no text, but perhaps tokens. ``usage`` so far."""

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk, where the client asked for it."""
