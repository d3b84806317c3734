"""A tokenizer built from the tables inside a GGUF file."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from router.byte_level_bpe import build_byte_level_bpe, byte_level_bytes
from router.gguf_metadata import read_gguf_metadata
from router.sentencepiece_bpe import build_sentencepiece_bpe, sentencepiece_bytes
from router.tokenizer_parts import TokenizerParts
from router.vocabulary import read_vocabulary
from serving_core.errors import ModelFileError


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Raises ``ModelFileError``."""
    metadata = read_gguf_metadata(path)
    vocabulary = read_vocabulary(metadata)
    model = metadata.require("tokenizer.ggml.model", str)
    if model == "gpt2":
        back_end, token_bytes = build_byte_level_bpe(metadata, vocabulary), byte_level_bytes(vocabulary)
    elif model == "llama":
        back_end, token_bytes = build_sentencepiece_bpe(metadata, vocabulary), sentencepiece_bytes(vocabulary)
    else:
        raise ModelFileError(f"{path} has a tokenizer of kind {model!r}, but only gpt2 and llama are supported.")
    special_ids = vocabulary.special_ids
    back_end.add_tokens(
        [
            AddedToken(vocabulary.texts[token_id], normalized=False, special=token_id in special_ids)
            for token_id in vocabulary.added_ids
        ]
    )
    return TokenizerParts(vocabulary=vocabulary, back_end=back_end, token_bytes=token_bytes)
