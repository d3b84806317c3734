"""A model on disk, whatever its format: what the loader needs of it, and the check that it holds the whole model.

1. opened: the headers are read, so that ``config`` and ``tensors`` are known; 2. ``check_tensors``: every tensor is there, in
its shape, and none is left over; 3. ``iter_pieces`` for each tensor; 4. closed. Steps 1 and 2 need no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llm_engine.decoder_tensors import ROPE_FACTORS, tensor_shapes
from llm_engine.model_config import ModelConfig
from llm_engine.weight_blocks import WeightBlocks
from llm_engine.weight_form import WeightForm
from serving_core.errors import ModelFileError
from serving_core.model_numbers import MAX_NUMBER, MIN_NUMBER

PIECE_ELEMENTS = 4 * 1024 * 1024
"""Weights are decoded about this many at a time, which bounds the float32 copy beside the final one to 16 MiB."""

_MAX_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as the checkpoint lists it: under its own name there, with the fastest dimension last.

    ``form`` is the narrowest that says what the stored type says, ``exact_form`` the narrowest that holds each weight as it is:
    wider where the type's blocks are not ours. In BFLOAT16 a weight is rounded, as it is wherever ``--dtype`` is bfloat16.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    form: WeightForm = WeightForm.BFLOAT16
    exact_form: WeightForm = WeightForm.BFLOAT16


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredModel:
    """What the headers say: the model's sizes, and its tensors by the names of ``decoder_tensors``."""

    config: ModelConfig
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """Some rows of one tensor, which counts as two-dimensional: a vector is one row.

    ``rows`` [num_rows] are places in the model's tensor, ``values`` [num_rows, row_length] what belongs there, ``num_bytes``
    what they took in the file.
    """

    rows: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPiece:
    """Some rows of one tensor as quantised blocks; the rest as in ``WeightPiece``."""

    rows: npt.NDArray[np.int64]
    blocks: WeightBlocks
    num_bytes: int


class Checkpoint(Protocol):
    """An open checkpoint. ``path`` is where it was found."""

    path: Path
    config: ModelConfig
    eos_token_ids: frozenset[int]

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What the model has a place for, by the names of ``decoder_tensors``."""

    @property
    def stray_names(self) -> Sequence[str]:
        """The stored names of all other tensors."""

    def stored_name(self, name: str) -> str:
        """What the checkpoint calls, or would call, the tensor ``name``."""

    def iter_pieces(self, name: str) -> Iterator[WeightPiece]:
        """Decode the tensor ``name`` piece by piece; together the pieces are the whole of it."""

    def iter_blocks(self, name: str, form: WeightForm) -> Iterator[BlockPiece]:
        """The same as blocks of ``form``, INT4 or INT8: those that are stored where the form holds them, else the nearest."""

    def model_print(self) -> str:
        """A hexadecimal digest that tells models apart. It does not prove that every weight is intact."""

    def close(self) -> None:
        """Release the files. Idempotent."""


def check_tensors(checkpoint: Checkpoint) -> None:
    """Names and shapes, and the few numbers that the rotary embedding is divided by. Raises ModelFileError for the first that
    does not fit."""
    shapes = tensor_shapes(checkpoint.config)
    if ROPE_FACTORS in checkpoint.tensors:
        shapes[ROPE_FACTORS] = (checkpoint.config.head_dim // 2,)
    missing = [checkpoint.stored_name(name) for name in shapes if name not in checkpoint.tensors]
    if missing:
        names = ", ".join(missing[:_MAX_NAMED]) + (f" and {len(missing) - _MAX_NAMED} more" if missing[_MAX_NAMED:] else "")
        raise ModelFileError(f"{checkpoint.path} lacks the tensor{'s' if missing[1:] else ''} {names}.")
    for name, shape in shapes.items():
        stored = checkpoint.tensors[name]
        if stored.shape != shape:
            raise ModelFileError(
                f"{checkpoint.path}: tensor {stored.name} has shape {list(stored.shape)}; the model's sizes ask for "
                f"{list(shape)}."
            )
    for stored_name in checkpoint.stray_names:
        raise ModelFileError(f"{checkpoint.path} holds the tensor {stored_name}, which a model of this kind does not have.")
    if ROPE_FACTORS in shapes:
        for piece in checkpoint.iter_pieces(ROPE_FACTORS):
            if not np.all((piece.values >= MIN_NUMBER) & (piece.values <= MAX_NUMBER)):
                raise ModelFileError(
                    f"{checkpoint.path}: tensor {checkpoint.stored_name(ROPE_FACTORS)} divides by numbers that are not from "
                    f"{MIN_NUMBER:g} to {MAX_NUMBER:g}."
                )
