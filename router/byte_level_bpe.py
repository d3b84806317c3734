"""Byte-level BPE (``tokenizer.ggml.model`` = gpt2): every token is a run of bytes, written with one stand-in character each.

The table of stand-ins is that of GPT-2: printable Latin-1 bytes stand for themselves, the others for U+0100 upwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackEnd
from tokenizers.pre_tokenizers import PreTokenizer

from router.gguf_metadata import GGUFMetadata
from router.vocabulary import TokenType, Vocabulary
from serving_core.errors import ModelFileError

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """A way of splitting by a pattern. ``is_composed``: the text is put into Unicode's form NFC before. ``ignores_merges``:
    what is a token as a whole is not built from parts."""

    pattern: str
    is_composed: bool = False
    ignores_merges: bool = False


_SPLITS = {
    "llama-bpe": _Split(pattern=_LLAMA3_PATTERN, ignores_merges=True),
    "smaug-bpe": _Split(pattern=_LLAMA3_PATTERN),  # so llama.cpp's converter calls SmolLM3's
    "qwen2": _Split(pattern=_LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"), is_composed=True),
}


def build_byte_level_bpe(metadata: GGUFMetadata, vocabulary: Vocabulary) -> BackEnd:
    """Raises ``ModelFileError`` for an unknown ``tokenizer.ggml.pre`` or for merges that do not fit the vocabulary."""
    kind = metadata.get("tokenizer.ggml.pre", str) or "default"
    pre_tokenizer = _pre_tokenizer(kind)
    if pre_tokenizer is None:
        supported = ", ".join(("gpt-2", "smollm", *_SPLITS))
        raise ModelFileError(f"{metadata.path} splits text in the way {kind!r}; supported are {supported}.")
    split = _SPLITS.get(kind)
    pairs = (merge.partition(" ") for merge in metadata.require_list("tokenizer.ggml.merges", str))
    merges = [(left, right) for left, _, right in pairs]
    ids = {text: token_id for token_id, text in enumerate(vocabulary.texts)}
    try:
        back_end = BackEnd(models.BPE(vocab=ids, merges=merges, ignore_merges=split is not None and split.ignores_merges))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{metadata.path} has merges that do not fit its vocabulary: {error}.") from error
    back_end.pre_tokenizer = pre_tokenizer
    if split is not None and split.is_composed:
        back_end.normalizer = normalizers.NFC()
    return back_end


def byte_level_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """The bytes of each token, index = id. Added tokens are written in plain text, not in stand-ins."""
    byte_of = {ord(symbol): byte for byte, symbol in enumerate(_byte_symbols())}
    added = {TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED}
    table: list[bytes] = []
    for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True):
        codes = [byte_of.get(ord(character)) for character in text]
        if kind in added or None in codes:
            table.append(text.encode("utf-8"))
        else:
            table.append(bytes(code for code in codes if code is not None))
    return table


def _byte_symbols() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _pre_tokenizer(kind: str) -> PreTokenizer | None:
    if kind in {"gpt-2", "default"}:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    if kind in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[kind].pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return None
