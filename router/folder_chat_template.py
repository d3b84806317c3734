"""Finds the chat template of a Hugging Face folder: a file of its own, or a value in the tokenizer's configuration."""

from __future__ import annotations

from pathlib import Path

from serving_core.errors import ModelFileError
from serving_core.model_json import ModelJson

_DEFAULT_NAME = "default"


def read_folder_chat_template(folder: Path) -> str | None:
    """The template's source, or None. Of several named ones it is the one called default. Raises ``ModelFileError``."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{path} cannot be read: {error}.") from error
    config = ModelJson.read_optional(folder / "tokenizer_config.json")
    if not isinstance(config.get("chat_template"), list):
        return config.text("chat_template")
    templates = {template.text("name"): template.text("template") for template in config.sections("chat_template")}
    return templates.get(_DEFAULT_NAME)
