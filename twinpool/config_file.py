"""A YAML file with the flags of ``twinpool serve`` under their own names. Turns it into arguments; judges no value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from serving_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """``arguments`` are as if typed on the command line, in order; ``model`` is MODEL, None where the file names none."""

    arguments: tuple[str, ...]
    model: str | None


class UnknownKey(ConfigError):
    """A key that is no flag."""

    def __init__(self, key: str, path: Path) -> None:
        super().__init__(f"unknown flag --{key} in {path}")
        self.key = key


def read_config_file(
    path: Path, *, flags: Mapping[str, bool], repeatable: Collection[str], opposites: Mapping[str, str]
) -> ConfigFile:
    """Read the file. ``flags`` are the known names without dashes, True for one that takes a value. Those that are
    ``repeatable`` may have a list of values. ``opposites`` are the switches that turn off what others turn on.

    A key with no value, or null, is as good as absent, and so is a switch that is false, unless it has an opposite. Raises
    ``UnknownKey``, and ``ConfigError`` with what is wrong and where.
    """
    arguments: list[str] = []
    model: str | None = None
    for key, value in _read_mapping(path).items():
        if key != "model" and key not in flags:
            raise UnknownKey(key, path)
        if value is None:
            continue
        if key == "model":
            model = _text(value, key, path)
        elif flags[key]:
            values = value if key in repeatable and isinstance(value, list) else [value]
            arguments += [f"--{key}={_text(each, key, path)}" for each in values]
        elif value is True:
            arguments.append(f"--{key}")
        elif value is False and key in opposites:
            arguments.append(f"--{opposites[key]}")
        elif value is not False:
            raise ConfigError(f"{key} in {path} is {value!r}, but must be true or false")
    return ConfigFile(arguments=tuple(arguments), model=model)


def _read_mapping(path: Path) -> dict[str, object]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a value of the wrong kind makes the library raise ValueError, KeyError and more
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold flags and their values, like 'port: 8000', but holds a {_kind(content)}")
    return {str(key): value for key, value in content.items()}


def _text(value: object, key: str, path: Path) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{key} in {path} is a {_kind(value)}, but must be one text or number")
    try:
        return str(value)
    except ValueError as error:
        raise ConfigError(f"{key} in {path} is a number of too many digits") from error


def _kind(value: object) -> str:
    return {"dict": "mapping", "str": "text", "bool": "yes or no"}.get(type(value).__name__, type(value).__name__)
