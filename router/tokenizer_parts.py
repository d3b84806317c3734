"""What a tokenizer is made of, whichever kind of file it was read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as BackEnd

from router.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """``back_end`` turns text into ids, special tokens included where they are written out, but adds none of its own.
    ``token_bytes`` are the bytes that each token adds to a text, index = id.
    """

    vocabulary: Vocabulary
    back_end: BackEnd
    token_bytes: Sequence[bytes]
