"""The key-value part of a GGUF file with its types checked: the tokenizer's tables, the chat template. Knows no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from serving_core.errors import ModelFileError
from serving_core.gguf_header import MetadataValue, map_gguf, read_gguf_header

_Kind = TypeVar("_Kind", str, int, float, bool)


class GGUFMetadata:
    """The key-value pairs of one file. Every getter raises ``ModelFileError`` naming file and key when the type is wrong."""

    def __init__(self, path: Path, values: Mapping[str, MetadataValue]) -> None:
        self.path = path
        self._values = values

    def require(self, key: str, kind: type[_Kind]) -> _Kind:
        """The value of ``key``, which has to be there."""
        value = self.get(key, kind)
        if value is None:
            raise ModelFileError(f"{self.path} has no {key} in its metadata, so it cannot be served.")
        return value

    def get(self, key: str, kind: type[_Kind]) -> _Kind | None:
        """The value of ``key``, or None where the file has none."""
        value = self._values.get(key)
        if value is None:
            return None
        return self._checked(key, value, kind)

    def require_list(self, key: str, kind: type[_Kind]) -> list[_Kind]:
        """The items of an array, each checked."""
        value = self._values.get(key)
        if not isinstance(value, list):
            raise ModelFileError(f"{self.path} has no array {key} in its metadata, so it cannot be served.")
        return [self._checked(key, item, kind) for item in value]

    def _checked(self, key: str, value: MetadataValue, kind: type[_Kind]) -> _Kind:
        if type(value) is not kind:  # exact, so that a boolean does not pass as an integer
            raise ModelFileError(f"{self.path} holds {key} as {type(value).__name__}, but it must be {kind.__name__}.")
        return value


def read_gguf_metadata(path: Path) -> GGUFMetadata:
    """Read every key-value pair of the file. Raises ``ModelFileError`` for a missing, truncated or foreign file."""
    with map_gguf(path) as data:
        return GGUFMetadata(path, read_gguf_header(data, path, with_arrays=True).metadata)
