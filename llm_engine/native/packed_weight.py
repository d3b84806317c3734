"""A weight matrix in the order of bytes in which the native kernels read it.

Output channels, padded with zeros to a multiple of 32, lie in blocks of 16, one to a lane of a register. Inputs, padded to a
multiple of 32, lie in groups of 32. A block's group is one run of bytes: for each pair of inputs the pairs of all 16 channels,
one after another. With four bits a weight, a 16-bit number holds a channel's weights of four pairs, the first in its low bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.weight_form import GROUP_SIZE, WeightForm

_NUM_LANES = 16
_NUM_PAIRS = GROUP_SIZE // 2
_CHANNEL_MULTIPLE = 2 * _NUM_LANES


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedWeight:
    """A matrix of ``num_out`` channels by ``num_in`` inputs."""

    form: WeightForm
    num_out: int
    num_in: int
    data: Tensor  # [num_blocks, num_groups, bytes of a block's group], uint8
    scales: Tensor | None  # [num_blocks, num_groups, 2 (scale, zero), 16], float32; None in BFLOAT16

    @property
    def nbytes(self) -> int:
        """What it takes of memory."""
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)


def pack_int4(q: Tensor, scale: Tensor, zero: Tensor) -> PackedWeight:
    """q [num_out, num_in], uint8 from 0 to 15; scale and zero [num_out, num_groups]."""
    assert q.dtype is torch.uint8
    return PackedWeight(
        form=WeightForm.INT4,
        num_out=q.shape[0],
        num_in=q.shape[1],
        data=_in_blocks(_in_quads(_padded(q)), scale.shape[1]),
        scales=_in_lanes(scale, zero, q),
    )


def pack_int8(q: Tensor, scale: Tensor, zero: Tensor | None = None) -> PackedWeight:
    """q [num_out, num_in], int8; scale and zero [num_out, num_groups]. Without ``zero`` it is 0 throughout."""
    assert q.dtype is torch.int8
    return PackedWeight(
        form=WeightForm.INT8,
        num_out=q.shape[0],
        num_in=q.shape[1],
        data=_in_blocks(_padded(q).view(torch.int16), scale.shape[1]),
        scales=_in_lanes(scale, torch.zeros_like(scale) if zero is None else zero, q),
    )


def pack_bfloat16(weight: Tensor) -> PackedWeight:
    """weight [num_out, num_in], bfloat16."""
    assert weight.dtype is torch.bfloat16
    return PackedWeight(
        form=WeightForm.BFLOAT16,
        num_out=weight.shape[0],
        num_in=weight.shape[1],
        data=_in_blocks(_padded(weight).view(torch.int32), -(-weight.shape[1] // GROUP_SIZE)),
        scales=None,
    )


def unpack(weight: PackedWeight) -> Tensor:
    """The matrix as it was before packing, [num_out, num_in], float32."""
    match weight.form:
        case WeightForm.INT4:
            halves = _by_lane(weight.data, 4, _NUM_LANES, 2, 2).permute(0, 1, 2, 5, 3, 4)
            pairs = torch.stack([halves & 15, halves >> 4], dim=4).flatten(2, 4)  # [num_blocks, num_groups, 16, 16, 2]
        case WeightForm.INT8:
            pairs = _by_lane(weight.data.view(torch.int8), _NUM_PAIRS, _NUM_LANES, 2)
        case WeightForm.BFLOAT16:
            pairs = _by_lane(weight.data.view(torch.bfloat16), _NUM_PAIRS, _NUM_LANES, 2)
    values = pairs.permute(0, 3, 1, 2, 4).flatten(3).float()  # [num_blocks, 16, num_groups, 32]
    if weight.scales is not None:
        scale, zero = weight.scales.permute(2, 0, 3, 1).unsqueeze(-1)  # each [num_blocks, 16, num_groups, 1]
        values = values * scale + zero
    return values.flatten(0, 1).flatten(1)[: weight.num_out, : weight.num_in].contiguous()


def unpack_rows(weight: PackedWeight, rows: Tensor) -> Tensor:
    """Some rows of the matrix as it was before packing, rows [num_rows] → [num_rows, num_in], float32."""
    blocks, lanes = rows // _NUM_LANES, rows % _NUM_LANES
    match weight.form:
        case WeightForm.INT4:
            halves = _by_lane(weight.data, 4, _NUM_LANES, 2, 2)[blocks, :, :, lanes]  # [num_rows, num_groups, 4, 2, 2]
            values = torch.stack([halves & 15, halves >> 4], dim=5).permute(0, 1, 2, 4, 5, 3)
        case WeightForm.INT8:
            values = _by_lane(weight.data.view(torch.int8), _NUM_PAIRS, _NUM_LANES, 2)[blocks, :, :, lanes]
        case WeightForm.BFLOAT16:
            values = _by_lane(weight.data.view(torch.bfloat16), _NUM_PAIRS, _NUM_LANES, 2)[blocks, :, :, lanes]
    groups = values.flatten(2).float()  # [num_rows, num_groups, 32]
    if weight.scales is not None:
        scale, zero = weight.scales[blocks, :, :, lanes].unsqueeze(-1).unbind(2)  # each [num_rows, num_groups, 1]
        groups = groups * scale + zero
    return groups.flatten(1)[:, : weight.num_in]


def _padded(matrix: Tensor) -> Tensor:
    """With zeros, to whole groups and whole pairs of blocks."""
    assert matrix.dim() == 2
    num_out, num_in = matrix.shape
    if num_in % GROUP_SIZE == num_out % _CHANNEL_MULTIPLE == 0:
        return matrix.contiguous()
    return functional.pad(matrix, (0, -num_in % GROUP_SIZE, 0, -num_out % _CHANNEL_MULTIPLE))


def _in_quads(q: Tensor) -> Tensor:
    """Weights of four bits, a byte each → [num_out, num_in / 8], int32: the first, then the second of each of four pairs."""
    pairs = q.view(torch.int64)  # four pairs, 16 bits each
    two_each = pairs | pairs >> 12  # in the first and third 16 bits: a pair and, 4 bits higher, the next one
    low, high = (two_each & 0xFFFF).int(), (two_each >> 32 & 0xFFFF).int()
    return low & 0xFF | (high & 0xFF) << 8 | low >> 8 << 16 | high >> 8 << 24


def _in_blocks(words: Tensor, num_groups: int) -> Tensor:
    """[num_out, num_words], each the weights that a lane reads at once → [num_blocks, num_groups, bytes of a block's group]."""
    num_out, num_words = words.shape
    blocks = words.view(-1, _NUM_LANES, num_words).transpose(1, 2).contiguous()  # [num_blocks, num_words, 16]
    return blocks.view(num_out // _NUM_LANES, num_groups, -1).view(torch.uint8)


def _by_lane(data: Tensor, *sizes: int) -> Tensor:
    """The last dimension of a block's group taken apart."""
    return data.view(*data.shape[:2], *sizes)


def _in_lanes(scale: Tensor, zero: Tensor, q: Tensor) -> Tensor:
    """[num_out, num_groups] each → [num_blocks, num_groups, 2, 16], float32."""
    assert scale.shape == zero.shape == (q.shape[0], -(-q.shape[1] // GROUP_SIZE)), "a scale and a zero for every group"
    both = torch.stack([scale.float(), zero.float()])  # [2, num_out, num_groups]
    padded = functional.pad(both, (0, 0, 0, -both.shape[1] % _CHANNEL_MULTIPLE))
    return padded.view(2, -1, _NUM_LANES, both.shape[2]).permute(1, 3, 0, 2).contiguous()
