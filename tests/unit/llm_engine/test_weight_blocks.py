from __future__ import annotations

import numpy as np
import pytest

from llm_engine.weight_blocks import quantize
from llm_engine.weight_form import WeightForm
from tests.weights import values_of


def gaussian(num_rows: int = 64, row_length: int = 256) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((num_rows, row_length)).astype(np.float32)


@pytest.mark.parametrize(("form", "num_steps", "rms"), [(WeightForm.INT8, 254, 0.006), (WeightForm.INT4, 15, 0.085)])
def test_no_weight_moves_by_more_than_half_a_step(form: WeightForm, num_steps: int, rms: float) -> None:
    values = gaussian()
    blocks = quantize(values, form)
    error = np.abs(values_of(blocks) - values)
    assert (error.reshape(64, -1, 32) <= 0.5001 * blocks.scale[..., None]).all()
    groups = values.reshape(64, -1, 32)
    width = 2 * np.abs(groups).max(-1) if form is WeightForm.INT8 else groups.max(-1) - groups.min(-1)
    np.testing.assert_allclose(blocks.scale, width / num_steps, rtol=1e-5)
    assert np.sqrt(np.square(error).mean()) < rms, "as a part of the weights' own spread, which is 1"


def test_eight_bits_have_no_zero_of_their_own() -> None:
    blocks = quantize(gaussian() + 3, WeightForm.INT8)
    assert not blocks.zero.any()
    assert blocks.q.min() >= -127


@pytest.mark.parametrize("form", [WeightForm.INT8, WeightForm.INT4])
@pytest.mark.parametrize("value", [0.0, 1.5, -2.0])
def test_a_group_of_one_value_is_kept(form: WeightForm, value: float) -> None:
    values = np.full((2, 32), value, dtype=np.float32)
    np.testing.assert_allclose(values_of(quantize(values, form)), values, rtol=1e-6)
