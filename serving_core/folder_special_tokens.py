"""The special tokens that a Hugging Face folder names, as texts: for tokenizer, chat template and the end of answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving_core.model_json import ModelJson


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSpecialTokens:
    """Texts of tokens, None where the folder names none."""

    bos: str | None
    eos: str | None
    unknown: str | None


def read_folder_special_tokens(folder: Path) -> FolderSpecialTokens:
    """From ``tokenizer_config.json``, else from ``special_tokens_map.json``, where older folders keep them. Raises
    ``ModelFileError``."""
    files = [ModelJson.read_optional(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json")]

    def text_of(key: str) -> str | None:
        return next((text for file in files if (text := file.token_text(key)) is not None), None)

    return FolderSpecialTokens(bos=text_of("bos_token"), eos=text_of("eos_token"), unknown=text_of("unk_token"))
