"""The safetensors files of a model folder: which tensor is in which file, and one tensor's weights at a time as float32.

Knows the container, not the model inside. Nothing in the folder is trusted: names lead nowhere but into the folder itself, and
pickled weights, which can run code when they are loaded, are never opened. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from llm_engine.checkpoint import PIECE_ELEMENTS
from serving_core.errors import ModelFileError
from serving_core.model_json import ModelJson

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where a tensor is and what it looks like. ``dtype`` is the format's own word, ``BF16`` for example."""

    shard: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class SafetensorsFolder:
    """All tensors of one folder, by name. Files that the index does not name are left alone.

    Raises ModelFileError from the constructor for a folder without safetensors, a shard that is missing, cut short or outside
    the folder, a tensor that is missing from its shard, stored twice, or stored in a type that is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shard_of = _read_index(folder)
        shards = sorted(set(shard_of.values())) if shard_of is not None else [SINGLE_NAME]
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise ModelFileError(f"{folder} lacks {', '.join(missing)}, which its {INDEX_NAME} names.")
        self.tensors: dict[str, TensorEntry] = {}
        for shard in shards:
            self._read_header(shard, shard_of)
        for name, shard in (shard_of or {}).items():
            if name not in self.tensors:
                raise ModelFileError(f"{folder / shard} lacks the tensor {name}, which {INDEX_NAME} says it holds.")
        self._open_shards: dict[str, Any] = {}

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        self._open_shards.clear()

    def iter_rows(self, name: str) -> Iterator[tuple[int, npt.NDArray[np.float32], int]]:
        """Decode a tensor piece by piece: (first row, float32 rows [num_rows, row_length], stored bytes of the piece).

        A vector is one row. Raises ModelFileError when the file cannot be read any more. The first call imports torch.
        """
        entry = self.tensors[name]
        row_length = entry.shape[-1]
        rows_per_piece = max(1, PIECE_ELEMENTS // row_length) if len(entry.shape) > 1 else row_length
        stored = self._shard(entry.shard).get_slice(name)
        for first in range(0, entry.shape[0], rows_per_piece):
            values = stored[first : first + rows_per_piece].float().numpy().reshape(-1, row_length)
            yield first, values, values.size * _ITEM_BYTES[entry.dtype]

    def ends(self, name: str) -> tuple[bytes, bytes]:
        """The first and the last row, or element, of a tensor as float32 bytes."""
        stored = self._shard(self.tensors[name].shard).get_slice(name)
        return stored[:1].float().numpy().tobytes(), stored[-1:].float().numpy().tobytes()

    def _shard(self, shard: str) -> Any:
        if shard not in self._open_shards:
            self._open_shards[shard] = _open(self.folder / shard, framework="pt")
        return self._open_shards[shard]

    def _read_header(self, shard: str, shard_of: dict[str, str] | None) -> None:
        path = self.folder / shard
        file = _open(path, framework="np")  # which reads no weights, and is there without torch
        for name in file.offset_keys():
            if name in self.tensors:
                raise ModelFileError(
                    f"{self.folder} holds the tensor {name} twice: in {self.tensors[name].shard} and in {shard}."
                )
            if shard_of is not None and shard_of.get(name) != shard:
                raise ModelFileError(f"{path} holds the tensor {name}, which {INDEX_NAME} does not place there.")
            stored = file.get_slice(name)
            entry = TensorEntry(shard=shard, shape=tuple(stored.get_shape()), dtype=stored.get_dtype())
            if entry.dtype not in _ITEM_BYTES:
                supported = ", ".join(_ITEM_BYTES)
                raise ModelFileError(f"{path}: tensor {name} is stored as {entry.dtype}; supported are {supported}.")
            if not entry.shape or 0 in entry.shape:
                raise ModelFileError(f"{path}: tensor {name} has the empty shape {list(entry.shape)}.")
            self.tensors[name] = entry


def _open(path: Path, *, framework: str) -> Any:
    try:
        return safe_open(path, framework=framework)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        raise ModelFileError(f"{path} is damaged or truncated: {error}.") from error


def _read_index(folder: Path) -> dict[str, str] | None:
    """The shard of each tensor, or None for a folder whose weights are in one file."""
    if not (folder / INDEX_NAME).exists():
        if not (folder / SINGLE_NAME).is_file():
            raise ModelFileError(_why_no_weights(folder))
        return None
    weight_map = ModelJson.read(folder / INDEX_NAME).section("weight_map")
    if weight_map is None:
        raise ModelFileError(f"{folder / INDEX_NAME} lacks weight_map, which must name the file of each tensor.")
    shard_of = {}
    for name in weight_map:
        shard = weight_map.text(name)
        if shard is None or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise weight_map.wrong(name, "a .safetensors file in the same folder")
        shard_of[name] = shard
    return shard_of


def _why_no_weights(folder: Path) -> str:
    stray = sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())
    if stray:
        return f"{folder} holds {', '.join(stray)} but no {INDEX_NAME} that says which tensor is where."
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        return (
            f"{folder} holds its weights as {pickled[0]} only, a pickle, which can run code when it is loaded and is never "
            f"read: convert it to {SINGLE_NAME}."
        )
    return f"{folder} holds no weights: there is neither a {SINGLE_NAME} nor a {INDEX_NAME}."
