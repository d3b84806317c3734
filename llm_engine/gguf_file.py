"""A GGUF file on disk: its metadata, its tensor table, and one tensor's weights at a time as float32.

Knows the container, not the model inside. Nothing in the file is trusted: every length is checked against the file's size
before it is followed, so a damaged file ends in one sentence. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llm_engine.checkpoint import PIECE_ELEMENTS
from serving_core.errors import ModelFileError

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SAMPLE_BYTES = 4096

_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

SUPPORTED_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)


@dataclass(frozen=True, slots=True)
class ArrayLength:
    """An array in the metadata. Only its length is kept: arrays describe the tokenizer, which is not the engine's."""

    length: int


MetadataValue = int | float | bool | str | ArrayLength


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One row of the tensor table. ``shape`` has the fastest dimension last, as torch writes it; ``offset`` is from the start
    of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file, memory-mapped. A context manager: leaving it releases the mapping, ``close`` may be repeated.

    Raises ModelFileError from the constructor for a missing file, anything that is not GGUF, and a truncated file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror}.") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise ModelFileError(f"{path} is empty, not a GGUF file.") from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the mapping."""
        self._map.close()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.num_bytes for info in self.tensors.values())

    def iter_rows(self, info: TensorInfo) -> Iterator[tuple[int, npt.NDArray[np.float32], int]]:
        """Decode a tensor piece by piece: (first row, float32 rows [num_rows, row_length], stored bytes of the piece).

        Rows are those of the tensor flattened to two dimensions; a vector is one row.
        """
        row_length = info.shape[-1]
        num_rows = math.prod(info.shape[:-1])
        row_bytes = info.num_bytes // num_rows
        rows_per_piece = max(1, PIECE_ELEMENTS // row_length)
        for first in range(0, num_rows, rows_per_piece):
            last = min(first + rows_per_piece, num_rows)
            stored = np.frombuffer(self._map[info.offset + first * row_bytes : info.offset + last * row_bytes], np.uint8)
            rows = dequantize(stored.reshape(last - first, row_bytes), info.type).astype(np.float32, copy=False)
            # A float32 tensor comes back as a read-only view, which torch does not accept.
            yield first, rows if rows.flags.writeable else rows.copy(), stored.nbytes

    def model_print(self) -> str:
        """SHA-256, in hexadecimal, over the whole header (metadata, tokenizer and tensor table included), the file's size, and
        the first and last 4 KiB of every tensor. It tells models apart; it does not prove that every weight is intact."""
        digest = hashlib.sha256(self._map[: self._header_bytes])
        digest.update(len(self._map).to_bytes(8, "little"))
        for info in self.tensors.values():
            end = info.offset + info.num_bytes
            digest.update(self._map[info.offset : min(info.offset + _SAMPLE_BYTES, end)])
            digest.update(self._map[max(info.offset, end - _SAMPLE_BYTES) : end])
        return digest.hexdigest()

    def _read_header(self) -> None:
        if self._map[:4] != _MAGIC:
            raise ModelFileError(f"{self.path} is not a GGUF file: it begins with {self._map[:4]!r}, not {_MAGIC!r}.")
        cursor = _Cursor(self._map, self.path, offset=4)
        (version,) = cursor.unpack("I")
        if version not in _SUPPORTED_VERSIONS:
            raise ModelFileError(f"{self.path} has GGUF version {version}; versions 2 and 3, little-endian, can be read.")
        num_tensors, num_values = cursor.unpack("QQ")

        self.metadata: dict[str, MetadataValue] = {}
        for _ in range(num_values):
            key = cursor.string()
            (value_type,) = cursor.unpack("I")
            self.metadata[key] = cursor.value(value_type)

        table = [cursor.tensor_row() for _ in range(num_tensors)]
        self._header_bytes = cursor.offset
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileError(f"{self.path} has general.alignment {alignment!r}, which must be a positive number.")
        data_start = -(-cursor.offset // alignment) * alignment

        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, type_number, offset in table:
            info = self._tensor_info(name, shape, type_number, data_start + offset)
            if name in self.tensors:
                raise ModelFileError(f"{self.path} holds the tensor {name} twice.")
            self.tensors[name] = info

    def _tensor_info(self, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> TensorInfo:
        try:
            tensor_type = GGMLQuantizationType(type_number)
        except ValueError as error:
            raise ModelFileError(f"{self.path}: tensor {name} has the unknown type number {type_number}.") from error
        if tensor_type not in SUPPORTED_TYPES:
            names = ", ".join(sorted(supported.name for supported in SUPPORTED_TYPES))
            raise ModelFileError(f"{self.path}: tensor {name} is stored as {tensor_type.name}; supported are {names}.")
        if not shape or 0 in shape:
            raise ModelFileError(f"{self.path}: tensor {name} has the empty shape {list(shape)}.")
        elements_per_block, bytes_per_block = GGML_QUANT_SIZES[tensor_type]
        if shape[-1] % elements_per_block:
            raise ModelFileError(
                f"{self.path}: rows of tensor {name} hold {shape[-1]} values, not a multiple of {elements_per_block} as "
                f"{tensor_type.name} needs."
            )
        num_bytes = math.prod(shape) // elements_per_block * bytes_per_block
        if offset + num_bytes > len(self._map):
            raise ModelFileError(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + num_bytes} and the file has {len(self._map)}."
            )
        return TensorInfo(name=name, shape=shape, type=tensor_type, offset=offset, num_bytes=num_bytes)


class _Cursor:
    """Reads the header from front to back and never past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path, *, offset: int) -> None:
        self._data = data
        self._path = path
        self.offset = offset

    def unpack(self, format_: str) -> tuple[int, ...]:
        start = self._advance(struct.calcsize("<" + format_))
        return struct.unpack_from("<" + format_, self._data, start)

    def string(self) -> str:
        (length,) = self.unpack("Q")
        start = self._advance(length)
        try:
            return self._data[start : self.offset].decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self._path} is damaged: the text at byte {start} of its header is not UTF-8.") from error

    def value(self, value_type: int) -> MetadataValue:
        if value_type in _SCALAR_FORMATS:
            (scalar,) = self.unpack(_SCALAR_FORMATS[value_type])
            return scalar
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY:
            return self._array()
        raise self._unknown_type(value_type)

    def tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape with the fastest dimension last, type number, offset from the start of the data)."""
        name = self.string()
        (num_dimensions,) = self.unpack("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ModelFileError(f"{self._path} is damaged: tensor {name} has {num_dimensions} dimensions.")
        shape = self.unpack("Q" * num_dimensions)
        type_number, offset = self.unpack("IQ")
        return name, shape[::-1], type_number, offset

    def _array(self) -> ArrayLength:
        item_type, length = self.unpack("IQ")
        if item_type in _SCALAR_FORMATS:
            self._advance(length * struct.calcsize("<" + _SCALAR_FORMATS[item_type]))
        elif item_type == _STRING:
            for _ in range(length):
                self._advance(self.unpack("Q")[0])
        else:
            raise self._unknown_type(item_type)
        return ArrayLength(length)

    def _advance(self, num_bytes: int) -> int:
        start = self.offset
        if start + num_bytes > len(self._data):
            raise ModelFileError(f"{self._path} is truncated: its header goes on past its end, byte {len(self._data)}.")
        self.offset = start + num_bytes
        return start

    def _unknown_type(self, value_type: int) -> ModelFileError:
        return ModelFileError(f"{self._path} is damaged: its header has a value of the unknown type {value_type}.")
