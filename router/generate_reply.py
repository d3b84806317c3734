"""The JSON of /generate: one answer with its token ids, whole or in chunks that say what came since the chunk before."""

from __future__ import annotations

from collections.abc import Sequence

from router.reply import ChoiceText, Json, Usage


class GenerateReply:
    """``request_id`` is the one that /admin/pages shows."""

    def __init__(self, *, request_id: str) -> None:
        self._request_id = request_id

    def whole(self, choices: Sequence[tuple[ChoiceText, str]], usage: Usage) -> Json:
        ((choice, finish_reason),) = choices
        return self._body(choice, finish_reason, usage)

    def opening_chunks(self, num_choices: int) -> Sequence[Json]:
        return []

    def text_chunk(self, choice: ChoiceText) -> Json:
        return self._body(choice, None, None)

    def closing_chunk(self, choice: ChoiceText, finish_reason: str, usage: Usage) -> Json:
        return self._body(choice, finish_reason, usage)

    def usage_chunk(self, usage: Usage) -> Json:
        raise AssertionError("the closing chunk has the usage")

    def _body(self, choice: ChoiceText, finish_reason: str | None, usage: Usage | None) -> Json:
        return {
            "text": choice.text,
            "token_ids": [token.token_id for token in choice.tokens],
            "finish_reason": finish_reason,
            "usage": usage and usage.as_json(),
            "request_id": self._request_id,
        }
