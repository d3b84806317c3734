"""SentencePiece's BPE (``tokenizer.ggml.model`` = llama): pieces with scores, a low line for a space, bytes as a fallback.

The file lists scores, not merges: a pair may be merged when its concatenation is a piece, pieces of higher score first.
"""

from __future__ import annotations

from tokenizers import Tokenizer as BackEnd
from tokenizers import models, normalizers

from router.gguf_metadata import GGUFMetadata
from router.vocabulary import TokenType, Vocabulary
from serving_core.errors import ModelFileError

_SPACE = "\u2581"


def build_sentencepiece_bpe(metadata: GGUFMetadata, vocabulary: Vocabulary) -> BackEnd:
    """Raises ``ModelFileError`` where scores are missing. A space goes before the text unless the file says otherwise."""
    scores = metadata.require_list("tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.texts):
        raise ModelFileError(f"{metadata.path} lists {len(vocabulary.texts)} tokens but {len(scores)} scores.")
    back_end = BackEnd(
        models.BPE(
            vocab={text: token_id for token_id, text in enumerate(vocabulary.texts)},
            merges=_merges(vocabulary, scores),
            unk_token=vocabulary.text_of(vocabulary.unknown_id) or None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    if metadata.get("tokenizer.ggml.add_space_prefix", bool) is False:
        back_end.normalizer = spaces
    else:
        back_end.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
    return back_end


def sentencepiece_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """The bytes of each token, index = id."""
    table: list[bytes] = []
    for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True):
        if kind is TokenType.BYTE:
            table.append(bytes([int(text[1:-1], 16)]))  # written <0xAB>
        else:
            table.append(text.replace(_SPACE, " ").encode("utf-8"))
    return table


def _merges(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    ids = {
        text: token_id
        for token_id, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True))
        if kind is TokenType.NORMAL
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, token_id in ids.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]
