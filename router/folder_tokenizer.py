"""A tokenizer read from the ``tokenizer.json`` of a Hugging Face folder. No code that comes with a folder is ever run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer as BackEnd

from router.byte_level_bpe import byte_level_bytes
from router.sentencepiece_bpe import sentencepiece_bytes
from router.tokenizer_parts import TokenizerParts
from router.vocabulary import TokenType, Vocabulary
from serving_core.errors import ModelFileError
from serving_core.folder_special_tokens import read_folder_special_tokens

_BYTE_LEVEL = frozenset({"ByteLevel"})
_BYTE_FORM = re.compile("<0x[0-9A-Fa-f]{2}>")
_SENTENCEPIECE = frozenset({"ByteFallback", "Metaspace", "Replace"})


def read_folder_tokenizer(folder: Path) -> TokenizerParts:
    """Raises ``ModelFileError`` for a folder without ``tokenizer.json``, or with one of a kind that is not supported."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelFileError(f"{folder} lacks tokenizer.json, which must hold its tokenizer.")
    try:
        back_end = BackEnd.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path} is not a tokenizer that can be read: {error}.") from error
    # A file may carry the limits of whoever trained it, which would cut prompts short without a word.
    back_end.no_truncation()
    back_end.no_padding()
    vocabulary = _read_vocabulary(folder, back_end)
    decoders = frozenset(_decoder_types(json.loads(back_end.to_str())["decoder"]))
    if decoders & _BYTE_LEVEL:
        token_bytes = byte_level_bytes(vocabulary)
    elif decoders & _SENTENCEPIECE:
        token_bytes = sentencepiece_bytes(vocabulary)
    else:
        found = ", ".join(sorted(decoders)) or "none"
        raise ModelFileError(f"{path} has a decoder of kind {found}, but only byte-level and SentencePiece's are supported.")
    return TokenizerParts(vocabulary=vocabulary, back_end=back_end, token_bytes=token_bytes)


def _read_vocabulary(folder: Path, back_end: BackEnd) -> Vocabulary:
    names = read_folder_special_tokens(folder)
    added = back_end.get_added_tokens_decoder()
    ids = back_end.get_vocab(with_added_tokens=True)
    texts = [""] * (max(ids.values(), default=-1) + 1)
    types = [TokenType.UNUSED] * len(texts)
    for text, token_id in ids.items():
        texts[token_id] = text
        types[token_id] = TokenType.BYTE if _is_byte(text) else TokenType.NORMAL
    for token_id, token in added.items():
        types[token_id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    if not texts:
        raise ModelFileError(f"{folder / 'tokenizer.json'} has an empty vocabulary, so it cannot be served.")

    def id_of(key: str, text: str | None) -> int | None:
        if text is not None and text not in ids:
            raise ModelFileError(f"{folder} names {text!r} as {key}, but its tokenizer has no such token.")
        return None if text is None else ids[text]

    bos_id = id_of("bos_token", names.bos)
    return Vocabulary(
        texts=tuple(texts),
        types=tuple(types),
        bos_id=bos_id,
        eos_id=id_of("eos_token", names.eos),
        unknown_id=None if names.unknown is None else ids.get(names.unknown),
        adds_bos=_adds_bos(folder, back_end, bos_id),
    )


def _adds_bos(folder: Path, back_end: BackEnd, bos_id: int | None) -> bool:
    """Whether the file's post-processor puts BOS in front, as seen from what it makes of a text."""
    try:
        plain, whole = (back_end.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{folder / 'tokenizer.json'} makes no tokens of a plain text: {error}.") from error
    if whole == plain:
        return False
    if bos_id is not None and whole == [bos_id, *plain]:
        return True
    raise ModelFileError(
        f"{folder / 'tokenizer.json'} adds other tokens to a text than {'a BOS token' if bos_id is None else f'BOS, {bos_id}'} "
        f"in front: {plain} becomes {whole}."
    )


def _is_byte(text: str) -> bool:
    """Whether the token stands for one byte, as in <0xAB>."""
    return _BYTE_FORM.fullmatch(text) is not None


def _decoder_types(decoder: object) -> Iterator[str]:
    """The kinds of a decoder and of those inside it."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or []:
            yield from _decoder_types(part)
