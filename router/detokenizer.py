"""Token ids to text, one at a time. Never gives out part of a character; knows nothing of stop strings or requests.

The pieces, joined, equal ``Tokenizer.decode`` of all ids: a UTF-8 decoder carries at most three bytes from token to token, so
a token costs its own length, whatever came before.
"""

from __future__ import annotations

import codecs

from router.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer as it grows. Special tokens add nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; may be empty."""
        if token_id in self._tokenizer.special_token_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end: U+FFFD when the last character was cut short, else nothing."""
        return self._decoder.decode(b"", final=True)
