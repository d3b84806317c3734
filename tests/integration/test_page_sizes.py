"""Pages of any size give the same numbers, in one worker and from one to another: what the covering array, which is in float32,
leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving_core.generate_request import GenerateRequest
from serving_core.kv_page_layout import KVDType
from tests.integration.served_model import ServedModel, make_prompt, make_request

LENGTHS = (1, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65)
NUM_TOKENS = 20  # over a page's edge, from every length


def make_requests() -> list[GenerateRequest]:
    """Each length greedily and with a seed, and no prompt the beginning of another."""
    return [
        make_request(f"{length}-{temperature}", make_prompt(length, length), temperature=temperature, max_tokens=NUM_TOKENS)
        for length in LENGTHS
        for temperature in (0.0, 0.9)
    ]


@pytest.mark.parametrize("dtype", [KVDType.FLOAT32, KVDType.BFLOAT16], ids=lambda dtype: dtype.value)
async def test_attention_does_not_depend_on_the_page_size(tiny_model: ServedModel, dtype: KVDType) -> None:
    model = ServedModel.load(tiny_model.path, dtype)
    first, *others = [await model.answers(make_requests(), {"colocated-0": size}) for size in (8, 16, 24, 32)]
    for other in others:
        assert other == first  # log probabilities too, bit for bit


@pytest.mark.parametrize("cache_dtype", [KVDType.BFLOAT16, KVDType.INT8], ids=lambda dtype: dtype.value)
async def test_a_pair_in_bfloat16(tiny_model: ServedModel, cache_dtype: KVDType) -> None:
    """With int8, scales go with their numbers."""
    model = ServedModel.load(tiny_model.path, KVDType.BFLOAT16)
    engine = replace(model.engine, kv_cache_dtype=cache_dtype)
    one, *pairs = [
        await model.answers(make_requests(), page_sizes, engine=engine)
        for page_sizes in ({"colocated-0": 16}, {"prefill-0": 8, "decode-0": 32}, {"prefill-0": 32, "decode-0": 16})
    ]
    for pair in pairs:
        assert pair == one
