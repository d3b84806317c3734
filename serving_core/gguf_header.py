"""The front of a GGUF file: its key-value pairs and its tensor table. Knows neither models nor weights.

Nothing in the file is trusted: every length is checked against the file's size before it is followed, so a damaged file ends
in one sentence. The ``gguf`` package's reader is not used because it keeps each of 100,000 strings as an array: 2.0 s for the
default model, where this file takes 0.1 s. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from serving_core.errors import ModelFileError

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, repr=False)
class ArrayLength:
    """Stands for an array whose items were not asked for."""

    length: int

    def __repr__(self) -> str:
        return f"a list of {self.length}"


Scalar = int | float | bool | str
MetadataValue = Scalar | list[Scalar] | ArrayLength


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One row of the tensor table, as it stands there, but for ``shape``, which has the fastest dimension last, as torch writes
    it. ``offset`` is from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """``num_bytes``: from the start of the file to the end of the tensor table."""

    metadata: dict[str, MetadataValue]
    tensor_rows: tuple[TensorRow, ...]
    num_bytes: int


def map_gguf(path: Path) -> mmap.mmap:
    """The file in memory, for the caller to close. Raises ``ModelFileError`` for one that is missing or empty."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelFileError(f"{path} is empty, not a GGUF file.") from error


def read_gguf_header(data: mmap.mmap, path: Path, *, with_arrays: bool) -> GgufHeader:
    """Read the header of the mapped file. ``with_arrays``: arrays as lists, else an ``ArrayLength`` for each.

    Raises ``ModelFileError`` for anything that is not GGUF, and for a truncated or damaged header.
    """
    if data[:4] != _MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file: it begins with {data[:4]!r}, not {_MAGIC!r}.")
    cursor = _Cursor(data, path, offset=4, with_arrays=with_arrays)
    (version,) = cursor.unpack("I")
    if version not in _SUPPORTED_VERSIONS:
        raise ModelFileError(f"{path} has GGUF version {version}; versions 2 and 3, little-endian, can be read.")
    num_tensors, num_values = cursor.unpack("QQ")
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value()
    tensor_rows = [cursor.tensor_row() for _ in range(num_tensors)]
    return GgufHeader(metadata=metadata, tensor_rows=tuple(tensor_rows), num_bytes=cursor.offset)


class _Cursor:
    """Reads the header from front to back and never past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path, *, offset: int, with_arrays: bool) -> None:
        self._data = data
        self._path = path
        self._with_arrays = with_arrays
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

    def value(self) -> MetadataValue:
        (value_type,) = self.unpack("I")
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY:
            item_type, length = self.unpack("IQ")
            return self._items(item_type, length) if self._with_arrays else self._skipped(item_type, length)
        (scalar,) = self.unpack(self._format_of(value_type))
        return scalar

    def tensor_row(self) -> TensorRow:
        name = self.string()
        (num_dimensions,) = self.unpack("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ModelFileError(f"{self._path} is damaged: tensor {name} has {num_dimensions} dimensions.")
        shape = self.unpack("Q" * num_dimensions)
        type_number, offset = self.unpack("IQ")
        return TensorRow(name=name, shape=shape[::-1], type_number=type_number, offset=offset)

    def _items(self, item_type: int, length: int) -> list[Scalar]:
        if item_type == _STRING:
            return [self.string() for _ in range(length)]
        item_format = self._format_of(item_type)
        start = self._advance(length * struct.calcsize("<" + item_format))
        return list(struct.unpack_from(f"<{length}{item_format}", self._data, start))

    def _skipped(self, item_type: int, length: int) -> ArrayLength:
        if item_type == _STRING:
            self._skip_strings(length)
        else:
            self._advance(length * struct.calcsize("<" + self._format_of(item_type)))
        return ArrayLength(length)

    def _skip_strings(self, count: int) -> None:
        """Without a call for each: a vocabulary has a hundred thousand, and whoever restarts a worker waits for this."""
        read_length = struct.Struct("<Q").unpack_from
        end = self.offset
        for _ in range(count):
            if end + 8 > len(self._data):
                break
            end += 8 + read_length(self._data, end)[0]
        else:
            self._advance(end - self.offset)
            return
        raise self._truncated()

    def _format_of(self, value_type: int) -> str:
        if value_type not in _SCALAR_FORMATS:
            raise ModelFileError(f"{self._path} is damaged: its header has a value of the unknown type {value_type}.")
        return _SCALAR_FORMATS[value_type]

    def _advance(self, num_bytes: int) -> int:
        start = self.offset
        if start + num_bytes > len(self._data):
            raise self._truncated()
        self.offset = start + num_bytes
        return start

    def _truncated(self) -> ModelFileError:
        return ModelFileError(f"{self._path} is truncated: its header goes on past its end, byte {len(self._data)}.")
