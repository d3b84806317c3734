"""Weights for tests: what blocks stand for, and a checkpoint whose weights lie on no grid."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from llm_engine.checkpoint import BlockPiece, WeightPiece
from llm_engine.gguf_checkpoint import GgufCheckpoint
from llm_engine.weight_blocks import WeightBlocks, quantize
from llm_engine.weight_form import GROUP_SIZE, WeightForm


def values_of(blocks: WeightBlocks) -> npt.NDArray[np.float32]:
    """The weights, [num_rows, row_length]."""
    groups = blocks.q.reshape(len(blocks.q), -1, GROUP_SIZE).astype(np.float32)
    values: npt.NDArray[np.float32] = groups * blocks.scale[..., None] + blocks.zero[..., None]
    return values.reshape(blocks.q.shape)


class DitheredCheckpoint(GgufCheckpoint):
    """A GGUF file whose quantised weights are moved, each by up to half a step of its group, to where they may have been before
    they were rounded. Its blocks are therefore not those that are stored."""

    def iter_pieces(self, name: str) -> Iterator[WeightPiece]:
        rng = np.random.default_rng(sum(name.encode()))
        for piece in super().iter_pieces(name):
            values = piece.values
            if len(self.tensors[name].shape) == 2:
                groups = values.reshape(len(values), -1, GROUP_SIZE)
                step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / np.float32(15)
                values = (groups + step * rng.uniform(-0.5, 0.5, groups.shape).astype(np.float32)).reshape(values.shape)
            yield WeightPiece(rows=piece.rows, values=values, num_bytes=piece.num_bytes)

    def iter_blocks(self, name: str, form: WeightForm) -> Iterator[BlockPiece]:
        for piece in self.iter_pieces(name):
            yield BlockPiece(rows=piece.rows, blocks=quantize(piece.values, form), num_bytes=piece.num_bytes)
