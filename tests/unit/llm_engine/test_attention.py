"""Attention through torch against its definition, and its independence of the batch and of chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from llm_engine.kv_cache import KVCache
from serving_core.kv_page_layout import WEIGHT_DTYPES, KVDType
from tests.unit.llm_engine.attention_sequences import LAYER, Sequences

HEADS = [(9, 3), (8, 2), (4, 4), (3, 1)]
TYPES = [  # of queries, keys and values as they are computed, and of the cache
    pytest.param(KVDType.FLOAT32, KVDType.FLOAT32, id="float32"),
    pytest.param(KVDType.BFLOAT16, KVDType.BFLOAT16, id="bfloat16"),
    pytest.param(KVDType.FLOAT32, KVDType.INT8, id="float32 over int8"),
    pytest.param(KVDType.BFLOAT16, KVDType.INT8, id="bfloat16 over int8"),
    pytest.param(KVDType.BFLOAT16, KVDType.FLOAT16, id="bfloat16 over float16"),
]
OTHER_TYPES = [
    (dtype, cache_dtype) for dtype in WEIGHT_DTYPES for cache_dtype in KVDType if cache_dtype not in (dtype, KVDType.FLOAT32)
]


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_it_computes_attention(num_heads: int, num_kv_heads: int, dtype: KVDType) -> None:
    sequences = Sequences([1, 40, 17], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    outputs = sequences.step((0, 0, 1), (1, 0, 40), (2, 0, 17))
    tolerance = 1e-5 if dtype is KVDType.FLOAT32 else 2e-2
    for index, output in enumerate(outputs):
        assert torch.allclose(output.double(), sequences.by_definition(index), atol=tolerance)


@pytest.mark.parametrize(("dtype", "cache_dtype"), OTHER_TYPES)
@pytest.mark.parametrize(("sliding_window", "page_size"), [(None, 16), (100, 24)])
def test_it_computes_attention_to_what_a_cache_of_another_type_holds(
    dtype: KVDType, cache_dtype: KVDType, sliding_window: int | None, page_size: int
) -> None:
    sequences = Sequences(
        [1, 40, 150],
        num_heads=9,
        num_kv_heads=3,
        dtype=dtype,
        cache_dtype=cache_dtype,
        sliding_window=sliding_window,
        page_size=page_size,
    )
    # 1. Near to what is computed without a cache, as far as its type allows.
    allowed = {KVDType.INT8: 0.04, KVDType.FP8: 0.15}.get(cache_dtype, 2e-2)
    outputs = sequences.step((0, 0, 1), (1, 0, 40), (2, 0, 150))
    for index, output in enumerate(outputs):
        assert torch.allclose(output.double(), sequences.by_definition(index), atol=allowed)

    # 2. Nearer to attention to what the cache holds.
    tolerance = 1e-5 if dtype is KVDType.FLOAT32 else 2e-2
    for index, output in enumerate(outputs):
        assert torch.allclose(output.double(), sequences.by_definition(index, is_stored=True), atol=tolerance)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize(("sliding_window", "page_size"), [(1, 16), (7, 16), (16, 16), (550, 16), (100, 24), (4000, 16)])
def test_it_computes_attention_in_a_window(sliding_window: int, page_size: int, dtype: KVDType) -> None:
    sequences = Sequences(
        [1, 40, 600], num_heads=4, num_kv_heads=2, dtype=dtype, sliding_window=sliding_window, page_size=page_size
    )
    tolerance = 1e-5 if dtype is KVDType.FLOAT32 else 2e-2
    for index, output in enumerate(sequences.step((0, 0, 1), (1, 0, 40), (2, 0, 600))):
        assert torch.allclose(output.double(), sequences.by_definition(index), atol=tolerance)


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize(("sliding_window", "page_size"), [(1, 16), (7, 16), (512, 16), (600, 16), (100, 24)])
def test_neither_chunks_nor_other_rows_change_a_bit_in_a_window(
    sliding_window: int, page_size: int, dtype: KVDType, cache_dtype: KVDType
) -> None:
    sequences = Sequences(
        [1700, 1100, 30],
        num_heads=4,
        num_kv_heads=1,
        dtype=dtype,
        cache_dtype=cache_dtype,
        sliding_window=sliding_window,
        page_size=page_size,
    )
    whole = [sequences.whole(index) for index in range(3)]
    for edges in ([0, 511, 512, 513, 1023, 1025, 1600, 1699, 1700], [0, 256, 1111, 1699, 1700]):
        chunks = [sequences.step((0, first, end))[0] for first, end in pairwise(edges)]
        assert torch.equal(torch.cat(chunks), whole[0])
    mixed = [(0, 1650, 1700), (1, 1099, 1100), (2, 0, 30)], [(2, 29, 30), (1, 1099, 1100), (0, 1699, 1700)]
    for spans in mixed:
        for (index, first, end), output in zip(spans, sequences.step(*spans), strict=True):
            assert torch.equal(output, whole[index][first:end])


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 31, 32, 33, 100])
def test_chunks_change_no_bit(num_heads: int, num_kv_heads: int, chunk: int, dtype: KVDType, cache_dtype: KVDType) -> None:
    length = 150
    sequences = Sequences([length], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype, cache_dtype=cache_dtype)
    whole = sequences.whole(0)
    stored = sequences.stored(0)
    chunks = [sequences.step((0, first, min(first + chunk, length)))[0] for first in range(0, length, chunk)]
    assert torch.equal(torch.cat(chunks), whole)
    assert all(map(torch.equal, sequences.stored(0), stored))


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
def test_chunks_change_no_bit_across_key_blocks(dtype: KVDType, cache_dtype: KVDType) -> None:
    sequences = Sequences([1100], num_heads=9, num_kv_heads=3, dtype=dtype, cache_dtype=cache_dtype)
    whole = sequences.whole(0)
    for edges in ([0, 511, 512, 513, 1023, 1025, 1100], [0, 256, 768, 1099, 1100]):
        chunks = [sequences.step((0, first, end))[0] for first, end in pairwise(edges)]
        assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_other_rows_change_no_bit(num_heads: int, num_kv_heads: int, dtype: KVDType, cache_dtype: KVDType) -> None:
    lengths = [300, 33, 600, 1, 33]
    sequences = Sequences(lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype, cache_dtype=cache_dtype)
    whole = [sequences.whole(index) for index in range(len(lengths))]
    last_tokens = [(index, length - 1, length) for index, length in enumerate(lengths)]
    mixed = [(0, 200, 300), (2, 599, 600), (4, 0, 33), (1, 32, 33), (3, 0, 1)]
    for spans in (last_tokens, last_tokens[::-1], last_tokens[1:3], mixed, *([span] for span in last_tokens)):
        for (index, first, end), output in zip(spans, sequences.step(*spans), strict=True):
            assert torch.equal(output, whole[index][first:end])


def test_rows_that_share_pages_are_gathered_in_turns_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences([1100], num_heads=4, num_kv_heads=2, dtype=KVDType.FLOAT32)
    whole = sequences.whole(0)
    num_gathered: list[int] = []
    gather = KVCache.gather

    def counting(cache: KVCache, layer: int, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        num_gathered.append(len(pages))
        return gather(cache, layer, pages, dtype)

    monkeypatch.setattr(KVCache, "gather", counting)
    for output in sequences.step(*[(0, 1099, 1100)] * 8):
        assert torch.equal(output, whole[1099:])
    num_pages, num_row_pages = sequences.cache.num_pages, 1536 // 16
    assert sum(num_gathered) == 8 * num_row_pages
    assert max(num_gathered) <= num_pages + 8 * 512 // 16


def test_only_the_own_layer_and_slots_are_written() -> None:
    sequences = Sequences([20, 20], num_heads=4, num_kv_heads=2, dtype=KVDType.FLOAT32)
    sequences.step((0, 0, 20))
    tensor = sequences.cache.tensor
    entered, others = list(sequences.page_ids[0]), list(sequences.page_ids[1])
    assert tensor[others].isnan().all(), "another sequence's pages stay as they were"
    assert not tensor[entered][:, [0, 2]].any(), "entered pages are cleared in every layer"
    stored = tensor[entered][:, LAYER].transpose(0, 1).flatten(1, 2)  # [2, num_slots, num_kv_heads, head_dim]
    assert torch.equal(stored[0, :20], sequences.key[0])
    assert torch.equal(stored[1, :20], sequences.value[0])
    assert not stored[:, 20:].any()
