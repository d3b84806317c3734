"""Reads whole tensors of a checkpoint, piece by piece, and tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llm_engine.checkpoint import Checkpoint
from llm_engine.weight_blocks import WeightBlocks
from llm_engine.weight_form import GROUP_SIZE, WeightForm


class TensorReader:
    """``on_bytes`` is called with the stored bytes of each piece. A tensor that is read again does not count again."""

    def __init__(self, checkpoint: Checkpoint, on_bytes: Callable[[int], None]) -> None:
        self.checkpoint = checkpoint
        self._on_bytes = on_bytes
        self._names_read: set[str] = set()

    def fill(self, name: str, destination: Tensor) -> None:
        """Write the tensor, whose shape has been checked, into its place."""
        assert destination.shape == self.checkpoint.tensors[name].shape
        rows = destination.view(-1, destination.shape[-1])
        for piece in self.checkpoint.iter_pieces(name):
            rows.index_copy_(0, torch.from_numpy(piece.rows), torch.from_numpy(piece.values).to(rows.dtype))
            self._count(name, piece.num_bytes)
        self._names_read.add(name)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor as ``dtype``."""
        tensor = torch.empty(self.checkpoint.tensors[name].shape, dtype=dtype)
        self.fill(name, tensor)
        return tensor

    def read_blocks(self, name: str, form: WeightForm) -> WeightBlocks:
        """The matrix as blocks of ``form``, INT4 or INT8."""
        num_rows, row_length = self.checkpoint.tensors[name].shape
        q: npt.NDArray[np.uint8] | npt.NDArray[np.int8]
        q = np.empty((num_rows, row_length), np.uint8) if form is WeightForm.INT4 else np.empty((num_rows, row_length), np.int8)
        scale, zero = np.empty((2, num_rows, row_length // GROUP_SIZE), dtype=np.float32)
        for piece in self.checkpoint.iter_blocks(name, form):
            q[piece.rows], scale[piece.rows], zero[piece.rows] = piece.blocks.q, piece.blocks.scale, piece.blocks.zero
            self._count(name, piece.num_bytes)
        self._names_read.add(name)
        return WeightBlocks(form=form, q=q, scale=scale, zero=zero)

    def _count(self, name: str, num_bytes: int) -> None:
        if name not in self._names_read:
            self._on_bytes(num_bytes)
