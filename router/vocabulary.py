"""A model's vocabulary, as its GGUF file or its folder lists it: token texts, their types, the ids with a meaning. Encodes
nothing, and does not decide which tokens end an answer: the engine does."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from router.gguf_metadata import GGUFMetadata
from serving_core.errors import ModelFileError


class TokenType(enum.IntEnum):
    """The values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED})
_SPECIAL = frozenset({TokenType.UNKNOWN, TokenType.CONTROL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Token texts and types, index = id. ``eos_id`` is what a chat template may write. ``added_ids`` are matched as whole words
    before any splitting; ``special_ids`` are those of them that never appear in an answer's text."""

    texts: tuple[str, ...]
    types: tuple[TokenType, ...]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    adds_bos: bool

    @property
    def added_ids(self) -> tuple[int, ...]:
        return tuple(token_id for token_id, kind in enumerate(self.types) if kind in _ADDED)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id, kind in enumerate(self.types) if kind in _SPECIAL)

    def text_of(self, token_id: int | None) -> str:
        """The text of a token, empty for None: what a chat template calls ``bos_token`` and ``eos_token``."""
        return "" if token_id is None else self.texts[token_id]


def read_vocabulary(metadata: GGUFMetadata) -> Vocabulary:
    """Raises ``ModelFileError`` where the tables are missing or do not fit each other."""
    texts = metadata.require_list("tokenizer.ggml.tokens", str)
    if not texts:
        raise ModelFileError(f"{metadata.path} has an empty vocabulary, so it cannot be served.")
    types = metadata.require_list("tokenizer.ggml.token_type", int)
    if len(types) != len(texts):
        raise ModelFileError(f"{metadata.path} lists {len(texts)} tokens but {len(types)} token types.")
    try:
        token_types = tuple(TokenType(kind) for kind in types)
    except ValueError as error:
        raise ModelFileError(f"{metadata.path} has a token of unknown type: {error}.") from error

    def token_id(name: str) -> int | None:
        found = metadata.get(f"tokenizer.ggml.{name}_token_id", int)
        if found is not None and not 0 <= found < len(texts):
            raise ModelFileError(f"{metadata.path} names token {found} as {name}, but it has {len(texts)} tokens.")
        return found

    bos_id = token_id("bos")
    return Vocabulary(
        texts=tuple(texts),
        types=token_types,
        bos_id=bos_id,
        eos_id=token_id("eos"),
        unknown_id=token_id("unknown"),
        adds_bos=bos_id is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", bool)),
    )
