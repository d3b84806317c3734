"""The blocks of a GGUF file's quantised types, taken apart without a change of any weight.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Types whose groups are not of 32 weights (Q6_K: 16) are
not here: no form of ours holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from llm_engine.weight_blocks import WeightBlocks
from llm_engine.weight_form import GROUP_SIZE, WeightForm

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Parts = tuple[npt.NDArray[np.uint8] | npt.NDArray[np.int8], _Floats, _Floats]
"""q, scale and zero of blocks, the groups of a block one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockType:
    form: WeightForm
    take_apart: Callable[[_Bytes], _Parts]


def exact_form(stored_type: GGMLQuantizationType) -> WeightForm | None:
    """The narrowest quantised form that holds every weight of that type as it is; None when there is none."""
    return _BLOCK_TYPES[stored_type].form if stored_type in _BLOCK_TYPES else None


def take_apart(stored: _Bytes, stored_type: GGMLQuantizationType) -> WeightBlocks:
    """Rows as stored, [num_rows, bytes of a row], in the type's ``exact_form``."""
    block_type = _BLOCK_TYPES[stored_type]
    blocks = stored.reshape(-1, GGML_QUANT_SIZES[stored_type][1])
    q, scale, zero = block_type.take_apart(blocks)
    num_rows = len(stored)
    return WeightBlocks(
        form=block_type.form, q=q.reshape(num_rows, -1), scale=scale.reshape(num_rows, -1), zero=zero.reshape(num_rows, -1)
    )


def _q4_0(blocks: _Bytes) -> _Parts:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, scale * np.float32(-8)


def _q4_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: _Bytes) -> _Parts:
    scale = _half(blocks, 0)
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return q.view(np.int8) - np.int8(16), scale, np.zeros_like(scale)


def _q5_1(blocks: _Bytes) -> _Parts:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return q.view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Parts:
    scale = _half(blocks, 0)
    return blocks[:, 2:].view(np.int8), scale, np.zeros_like(scale)


def _q4_k(blocks: _Bytes) -> _Parts:
    """Eight groups in 256 weights; each 32 bytes hold two of them, one in the low halves and one in the high."""
    scale, zero = _k_scales(blocks)
    halves = blocks[:, 16:].reshape(-1, 4, 1, GROUP_SIZE)
    return np.concatenate([halves & 15, halves >> 4], axis=2), scale, zero


def _q5_k(blocks: _Bytes) -> _Parts:
    """As Q4_K; the fifth bit of the weight in place i of group g is bit g of byte i."""
    scale, zero = _k_scales(blocks)
    halves = blocks[:, 48:].reshape(-1, 4, 1, GROUP_SIZE)
    low = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(-1, 8, GROUP_SIZE)
    groups = np.arange(8, dtype=np.uint8)[:, None]
    return (low | (blocks[:, None, 16:48] >> groups & 1) << 4).view(np.int8), scale, zero


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Scale and zero of the eight groups: 6 bits each in 12 bytes, times a scale of their own."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scale = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    minimum = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    return _half(blocks, 0) * scale.astype(np.float32), -(_half(blocks, 2) * minimum.astype(np.float32))


def _half(blocks: _Bytes, offset: int) -> _Floats:
    """The 16-bit float that starts there in each block, [num_blocks, 1]."""
    return blocks[:, offset : offset + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(halves: _Bytes) -> _Bytes:
    """[num_blocks, 16] → [num_blocks, 32]: the low halves, then the high ones."""
    q = np.empty((len(halves), GROUP_SIZE), dtype=np.uint8)
    np.bitwise_and(halves, 15, out=q[:, :16])
    np.right_shift(halves, 4, out=q[:, 16:])
    return q


def _fifth_bits(bits: _Bytes) -> _Bytes:
    """[num_blocks, 4] → [num_blocks, 32], each bit in the place of 16."""
    return np.unpackbits(bits, axis=1, bitorder="little") << np.uint8(4)


_BLOCK_TYPES: Mapping[GGMLQuantizationType, _BlockType] = {
    GGMLQuantizationType.Q4_0: _BlockType(form=WeightForm.INT4, take_apart=_q4_0),
    GGMLQuantizationType.Q4_1: _BlockType(form=WeightForm.INT4, take_apart=_q4_1),
    GGMLQuantizationType.Q4_K: _BlockType(form=WeightForm.INT4, take_apart=_q4_k),
    GGMLQuantizationType.Q5_0: _BlockType(form=WeightForm.INT8, take_apart=_q5_0),
    GGMLQuantizationType.Q5_1: _BlockType(form=WeightForm.INT8, take_apart=_q5_1),
    GGMLQuantizationType.Q5_K: _BlockType(form=WeightForm.INT8, take_apart=_q5_k),
    GGMLQuantizationType.Q8_0: _BlockType(form=WeightForm.INT8, take_apart=_q8_0),
}
