"""A JSON file of a model folder, read without trust: each value is checked for kind and range where it is used.

Engine and router both read such files, and must read them alike. What the values mean is theirs to know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from serving_core.errors import ModelFileError
from serving_core.model_numbers import MIN_NUMBER, checked_count, checked_number


class ModelJson:
    """The object in one file. A value of null counts as absent. Every getter raises ``ModelFileError`` that names file, key and
    value when the value is of the wrong kind.
    """

    def __init__(self, origin: str, values: Mapping[str, object]) -> None:
        self.origin = origin
        self._values = values

    @classmethod
    def read(cls, path: Path) -> ModelJson:
        """Raises ``ModelFileError`` for a file that is missing, cannot be read, or holds anything but one JSON object."""
        try:
            values = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{path} is not a JSON file: {error}.") from error
        if not isinstance(values, dict):
            raise ModelFileError(f"{path} must hold a JSON object.")
        return cls(str(path), values)

    @classmethod
    def read_optional(cls, path: Path) -> ModelJson:
        """As ``read``, but without any value where there is no such file."""
        return cls.read(path) if path.exists() else cls(str(path), {})

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the file states a value of null, where leaving the key out would mean something else."""
        return key in self._values and self._values[key] is None

    def __iter__(self) -> Iterator[str]:
        """The keys that have a value."""
        return (key for key in self._values if key in self)

    def count(self, key: str, *, default: int | None = None, smallest: int = 1) -> int:
        """A whole number of at least ``smallest``, and not too large to compute with."""
        return checked_count(self._get(key, default), partial(self.wrong, key), smallest=smallest)

    def number(self, key: str, *, default: float | None = None, smallest: float = MIN_NUMBER) -> float:
        """A number above 0, of at least ``smallest``, that float32 can compute with."""
        return checked_number(self._get(key, default), partial(self.wrong, key), smallest=smallest)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string, or None where the file states none."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def ids(self, key: str, *, kind: str = "a token id") -> frozenset[int]:
        """One id of that kind or a list of them; empty where the file states none."""
        value = self._values.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in values):
            raise self.wrong(key, f"{kind} or a list of them")
        return frozenset(values)

    def section(self, key: str) -> ModelJson | None:
        """An object inside this one, or None where the file states none."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return ModelJson(f"{self.origin.removesuffix(',')}, {key},", value)

    def sections(self, key: str) -> list[ModelJson]:
        """The objects of a list; empty where the file states none."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(key, "a list of objects")
        return [ModelJson(f"{self.origin}, {key},", item) for item in value]

    def token_text(self, key: str) -> str | None:
        """The text of a token, which files state as a string or as an object with a ``content``."""
        value = self._values.get(key)
        return value if isinstance(value, str) else section.text("content") if (section := self.section(key)) else None

    def get(self, key: str) -> object:
        """The value as it stands, unchecked."""
        return self._values.get(key)

    def refuse_unless(self, key: str, *supported: object) -> None:
        """Raises unless the value is absent or one of ``supported``."""
        if key in self and self._values[key] not in supported:
            raise self.wrong(key, " or ".join(repr(value) for value in supported) if supported else "absent")

    def wrong(self, key: str, right: str) -> ModelFileError:
        """The error for a value that is not ``right``."""
        value = self._values.get(key)
        found = f"{self.origin} lacks {key}" if value is None else f"{self.origin} has {_shortened(value)} for {key}"
        return ModelFileError(f"{found}, which must be {right}.")

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        return default if value is None else value


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
