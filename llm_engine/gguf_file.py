"""A GGUF file on disk: its metadata, its tensors' places, and one tensor's weights at a time as float32.

Knows the container, not the model inside. A tensor is checked against the file's size before it is followed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llm_engine.checkpoint import PIECE_ELEMENTS
from serving_core.errors import ModelFileError
from serving_core.gguf_header import TensorRow, map_gguf, read_gguf_header

_DEFAULT_ALIGNMENT = 32
_SAMPLE_BYTES = 4096

SUPPORTED_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where and how a tensor is stored. ``shape`` has the fastest dimension last, as torch writes it; ``offset`` is from the
    start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int

    def part(self, index: int) -> TensorInfo:
        """One of the ``shape[0]`` tensors that are stored as this one."""
        num_bytes = self.num_bytes // self.shape[0]
        return dataclasses.replace(self, shape=self.shape[1:], offset=self.offset + index * num_bytes, num_bytes=num_bytes)


class GgufFile:
    """An open GGUF file, memory-mapped. A context manager: leaving it releases the mapping, ``close`` may be repeated.

    Raises ModelFileError from the constructor for a missing file, anything that is not GGUF, and a truncated file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_gguf(path)
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

    def token_ids(self, text: str) -> list[int]:
        """The ids of the tokens that are written ``text``: at most one in a sound file. Reads the tokenizer's table anew."""
        tokens = read_gguf_header(self._map, self.path, with_arrays=True).metadata.get("tokenizer.ggml.tokens")
        return [index for index, token in enumerate(tokens) if token == text] if isinstance(tokens, list) else []

    def iter_rows(self, info: TensorInfo) -> Iterator[tuple[int, npt.NDArray[np.float32], int]]:
        """Decode a tensor piece by piece: (first row, float32 rows [num_rows, row_length], stored bytes of the piece)."""
        for first, stored in self.iter_stored(info):
            yield first, unpack(stored, info.type), stored.nbytes

    def iter_stored(self, info: TensorInfo) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """A tensor as it is stored, piece by piece: (first row, [num_rows, bytes of a row]).

        Rows are those of the tensor flattened to two dimensions; a vector is one row.
        """
        row_length = info.shape[-1]
        num_rows = math.prod(info.shape[:-1])
        row_bytes = info.num_bytes // num_rows
        rows_per_piece = max(1, PIECE_ELEMENTS // row_length)
        for first in range(0, num_rows, rows_per_piece):
            last = min(first + rows_per_piece, num_rows)
            stored = np.frombuffer(self._map[info.offset + first * row_bytes : info.offset + last * row_bytes], np.uint8)
            yield first, stored.reshape(last - first, row_bytes)

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
        # Arrays describe the tokenizer, which is not the engine's.
        header = read_gguf_header(self._map, self.path, with_arrays=False)
        self.metadata = header.metadata
        self._header_bytes = header.num_bytes
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileError(f"{self.path} has general.alignment {alignment!r}, which must be a positive number.")
        data_start = -(-header.num_bytes // alignment) * alignment

        self.tensors: dict[str, TensorInfo] = {}
        for row in header.tensor_rows:
            info = self._tensor_info(row, data_start)
            if row.name in self.tensors:
                raise ModelFileError(f"{self.path} holds the tensor {row.name} twice.")
            if row.offset % alignment:
                raise ModelFileError(
                    f"{self.path}: tensor {row.name} begins at byte {row.offset} of the data, no multiple of {alignment}."
                )
            self.tensors[row.name] = info
        in_order = sorted(self.tensors.values(), key=lambda info: info.offset)
        for before, after in itertools.pairwise(in_order):
            if before.offset + before.num_bytes > after.offset:
                raise ModelFileError(f"{self.path}: the tensors {before.name} and {after.name} lie on top of each other.")

    def _tensor_info(self, row: TensorRow, data_start: int) -> TensorInfo:
        name, shape, offset = row.name, row.shape, data_start + row.offset
        try:
            tensor_type = GGMLQuantizationType(row.type_number)
        except ValueError as error:
            raise ModelFileError(f"{self.path}: tensor {name} has the unknown type number {row.type_number}.") from error
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


def unpack(stored: npt.NDArray[np.uint8], stored_type: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """The weights of rows as stored, [num_rows, row_length]."""
    rows = dequantize(stored, stored_type).astype(np.float32, copy=False)
    # A float32 tensor comes back as a read-only view, which torch does not accept.
    return rows if rows.flags.writeable else rows.copy()
