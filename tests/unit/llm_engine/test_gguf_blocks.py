from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llm_engine.gguf_blocks import exact_form, take_apart
from llm_engine.gguf_file import SUPPORTED_TYPES
from llm_engine.weight_form import GROUP_SIZE, WeightForm
from tests.weights import values_of

NUM_ROWS, ROW_LENGTH = 6, 512
FORMS = {
    "Q4_0": WeightForm.INT4,
    "Q4_1": WeightForm.INT4,
    "Q4_K": WeightForm.INT4,
    "Q5_0": WeightForm.INT8,
    "Q5_1": WeightForm.INT8,
    "Q5_K": WeightForm.INT8,
    "Q8_0": WeightForm.INT8,
}


def random_rows(stored_type: GGMLQuantizationType) -> np.ndarray:
    """[NUM_ROWS, bytes of a row]: any bytes, but for the scales in front of each block, which are made finite."""
    block_length, block_bytes = GGML_QUANT_SIZES[stored_type]
    blocks = np.random.default_rng(3).integers(0, 256, (NUM_ROWS, ROW_LENGTH // block_length, block_bytes), dtype=np.uint8)
    blocks[..., [1, 3]] &= 0x3B
    return blocks.reshape(NUM_ROWS, -1)


@pytest.mark.parametrize("name", FORMS)
def test_every_weight_stays_as_it_is(name: str) -> None:
    stored_type = GGMLQuantizationType[name]
    rows = random_rows(stored_type)
    blocks = take_apart(rows, stored_type)
    assert blocks.form is exact_form(stored_type) is FORMS[name]
    assert blocks.scale.shape == blocks.zero.shape == (NUM_ROWS, ROW_LENGTH // GROUP_SIZE)
    assert np.array_equal(values_of(blocks), dequantize(rows, stored_type))
    assert np.array_equal(values_of(blocks.widened(WeightForm.INT8)), dequantize(rows, stored_type))


def test_four_bits_are_what_the_form_promises() -> None:
    for name in ("Q4_0", "Q4_1", "Q4_K"):
        blocks = take_apart(random_rows(GGMLQuantizationType[name]), GGMLQuantizationType[name])
        assert blocks.q.dtype == np.uint8
        assert blocks.q.max() == 15


def test_other_types_have_no_form_that_holds_them() -> None:
    assert {stored_type.name for stored_type in SUPPORTED_TYPES if exact_form(stored_type) is None} == {
        "F32",
        "F16",
        "BF16",
        "Q6_K",
    }
