"""Quantised weights in rows, as checkpoints hand them out and before they are packed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_engine.weight_form import GROUP_SIZE, WeightForm


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightBlocks:
    """Rows of a matrix: a weight is scale * q + zero. ``q`` is uint8 in the form INT4, int8 in the form INT8."""

    form: WeightForm
    q: npt.NDArray[np.uint8] | npt.NDArray[np.int8]  # [num_rows, row_length]
    scale: npt.NDArray[np.float32]  # [num_rows, row_length / 32]
    zero: npt.NDArray[np.float32]  # [num_rows, row_length / 32]

    def widened(self, form: WeightForm) -> WeightBlocks:
        """The same numbers in ``form``, which must hold them."""
        assert form.is_quantized
        assert form.holds(self.form)
        q = self.q if form is self.form else self.q.view(np.int8)  # 0 to 15 are the same bits with and without a sign
        return WeightBlocks(form=form, q=q, scale=self.scale, zero=self.zero)


def quantize(values: npt.NDArray[np.float32], form: WeightForm) -> WeightBlocks:
    """The nearest blocks to ``values`` [num_rows, row_length]: INT8 symmetric, its largest weight 127 steps from 0; INT4 with
    steps from the smallest weight of the group to the largest."""
    groups = values.reshape(len(values), -1, GROUP_SIZE)
    if form is WeightForm.INT8:
        scale = np.abs(groups).max(-1) / np.float32(127)
        zero = np.zeros_like(scale)
        q: npt.NDArray[np.uint8] | npt.NDArray[np.int8] = _steps(groups, scale).astype(np.int8)
    else:
        assert form is WeightForm.INT4
        zero = groups.min(-1)
        scale = (groups.max(-1) - zero) / np.float32(15)
        q = _steps(groups - zero[..., None], scale).astype(np.uint8)
    return WeightBlocks(form=form, q=q.reshape(values.shape), scale=scale, zero=zero)


def _steps(groups: npt.NDArray[np.float32], scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.rint(groups / np.where(scale > 0, scale, np.float32(1))[..., None])
