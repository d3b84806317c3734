from __future__ import annotations

import pytest
import torch

from llm_engine.embedding import EmbeddingTable, PackedEmbedding
from llm_engine.native.packed_weight import PackedWeight, pack_bfloat16, pack_int4, pack_int8, unpack
from llm_engine.weight_form import GROUP_SIZE, WeightForm

NUM_TOKENS, HIDDEN = 267, 64


def packed(form: WeightForm) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    scale, zero = torch.randn(2, NUM_TOKENS, HIDDEN // GROUP_SIZE, generator=generator)
    q = torch.randint(-128, 128, (NUM_TOKENS, HIDDEN), generator=generator)
    match form:
        case WeightForm.INT4:
            return pack_int4((q & 15).to(torch.uint8), scale, zero)
        case WeightForm.INT8:
            return pack_int8(q.to(torch.int8), scale, zero)
        case WeightForm.BFLOAT16:
            return pack_bfloat16(torch.randn(NUM_TOKENS, HIDDEN, generator=generator).bfloat16())


@pytest.mark.parametrize("form", WeightForm)
def test_tokens_are_looked_up_in_the_head_as_in_a_table_of_the_same_numbers(form: WeightForm) -> None:
    head = packed(form)
    token_ids = torch.tensor([0, 15, 16, 17, 266, 31, 32, 0])
    assert torch.equal(PackedEmbedding(head)(token_ids), unpack(head)[token_ids])
    assert PackedEmbedding(head).dtype == torch.bfloat16


@pytest.mark.parametrize(("is_summed_wide", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_a_table_says_what_the_layers_add_to(is_summed_wide: bool, dtype: torch.dtype) -> None:
    vectors = torch.randn(NUM_TOKENS, HIDDEN).bfloat16()
    found = EmbeddingTable(vectors, is_summed_wide)(torch.tensor([3, 0, 3]))
    assert found.dtype is dtype
    assert torch.equal(found.bfloat16(), vectors[[3, 0, 3]])
