"""Logprobs as OpenAI clients get them, in the two shapes of chat and of plain completions. Knows the tokens' texts and bytes.

A token that is no whole characters, such as half of an emoji, stands as ``bytes:\\xf0\\x9f``; two tokens of one text, as byte
tokens make them, are told apart as ``token_id:N``. Every sampled token has its entry, an end token too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.answer import AnswerToken
from router.tokenizer import Tokenizer
from serving_core.token_event import TokenLogprobs

_LOWEST = -9999.0
"""What OpenAI reports for a token that is next to impossible."""

Json = Mapping[str, object]


class LogprobReport:
    """Writes reports of one model's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of_chat(self, tokens: Sequence[AnswerToken]) -> Json:
        """``choices[].logprobs`` of a chat completion or of one chunk of it."""
        return {"content": [self._chat_entry(token, _logprobs_of(token)) for token in tokens], "refusal": None}

    def of_text(self, tokens: Sequence[AnswerToken]) -> Json:
        """``choices[].logprobs`` of a completion or of one chunk of it. Offsets count characters from the answer's first."""
        return {
            "tokens": [self._text_of(token.token_id) for token in tokens],
            "token_logprobs": [_rounded(_logprobs_of(token).logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token, _logprobs_of(token)) for token in tokens],
            "text_offset": [token.text_offset for token in tokens],
        }

    def _chat_entry(self, token: AnswerToken, logprobs: TokenLogprobs) -> Json:
        alternatives = [self._chat_token(token_id, logprob) for token_id, logprob in logprobs.top]
        return {**self._chat_token(token.token_id, logprobs.logprob), "top_logprobs": alternatives}

    def _chat_token(self, token_id: int, logprob: float) -> Json:
        token_bytes = self._tokenizer.token_bytes(token_id)
        return {"token": self._text_of(token_id), "logprob": _rounded(logprob), "bytes": list(token_bytes)}

    def _alternatives(self, token: AnswerToken, logprobs: TokenLogprobs) -> Mapping[str, float]:
        """The most likely tokens by their texts, and the chosen one where it is not among them."""
        by_text: dict[str, float] = {}
        for token_id, logprob in dict([*logprobs.top, (token.token_id, logprobs.logprob)]).items():
            text = self._text_of(token_id)
            by_text[text if text not in by_text else f"token_id:{token_id}"] = _rounded(logprob)
        return by_text

    def _text_of(self, token_id: int) -> str:
        token_bytes = self._tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _logprobs_of(token: AnswerToken) -> TokenLogprobs:
    assert token.logprobs is not None, "the worker was asked for them"
    return token.logprobs


def _rounded(logprob: float) -> float:
    return max(logprob, _LOWEST)
