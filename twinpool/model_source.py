"""Where a model comes from: a name we know, a path, or the Hugging Face Hub. Reads nothing but names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving_core.errors import ConfigError
from twinpool.hub_models import fetch_hub_model, is_hub_id
from twinpool.packaged_models import PACKAGED_MODELS, find_packaged_model

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A weights file or model folder, and the name clients know it by."""

    path: Path
    name: str


def find_model(model: str) -> ModelSource:
    """The place of ``model``: one of the packaged names, a path to a ``.gguf`` file or to a Hugging Face folder, or
    ``org/name`` on the Hugging Face Hub, which is downloaded unless the local cache has it.

    Raises ``ConfigError`` when there is no such model, and ``ModelFileError`` when the hub does not give it.
    """
    if model in PACKAGED_MODELS:
        return ModelSource(path=find_packaged_model(model), name=model)
    if not model.strip():
        raise ConfigError("MODEL is empty: give it a value or leave it out")
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # too long, not to be looked at, or of a user who is not there
        raise ConfigError(f"MODEL {model!r} cannot be looked up: {getattr(error, 'strerror', None) or error}") from error
    if is_folder:
        return ModelSource(path=path.resolve(), name=path.resolve().name)
    if path.suffix.lower() == ".gguf":
        if not is_file:
            raise ConfigError(f"MODEL {model!r} is no file")
        return ModelSource(path=path.resolve(), name=path.stem)
    if is_hub_id(model):
        return ModelSource(path=fetch_hub_model(model), name=model)
    names = ", ".join(sorted(PACKAGED_MODELS))
    raise ConfigError(
        f"MODEL {model!r} is neither a known name ({names}), nor a path to a .gguf file or a model folder, nor org/name on "
        "the Hugging Face Hub"
    )
