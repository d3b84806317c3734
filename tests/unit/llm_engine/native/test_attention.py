"""Attention on the native kernels against its definition, and its independence of the batch, of chunks and of threads."""

from __future__ import annotations

import pytest
import torch

from llm_engine.native.library import NativeLibrary
from llm_engine.rotation import Rotation
from serving_core.kv_page_layout import KVDType
from tests.unit.llm_engine.attention_sequences import LAYER, Sequences

TOLERANCE = 2e-2
SIZES = [
    *[(9, 3, 64), (4, 1, 32), (7, 1, 80), (6, 3, 96), (8, 2, 112), (8, 2, 128), (4, 1, 256)],
    *[(64, 8, 64), (5, 5, 16), (48, 1, 8)],
]
"""Heads, key-value heads, width of a head."""
CACHE_DTYPES = [KVDType.BFLOAT16, KVDType.FLOAT16, KVDType.INT8]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SIZES)
@pytest.mark.parametrize("page_size", [1, 16, 24, 256])
def test_it_computes_attention(
    library: NativeLibrary, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int
) -> None:
    sequences = Sequences(
        [1, 40, 17, 8, 129],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=KVDType.BFLOAT16,
        page_size=page_size,
        library=library,
    )
    for index, output in enumerate(sequences.step((0, 0, 1), (1, 0, 40), (2, 0, 17), (3, 0, 8), (4, 0, 129))):
        assert torch.allclose(output.double(), sequences.by_definition(index), atol=TOLERANCE)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_it_computes_attention_to_what_the_cache_holds(
    library: NativeLibrary, sizes: tuple[int, int, int], page_size: int, cache_dtype: KVDType
) -> None:
    num_heads, num_kv_heads, head_dim = sizes
    native, plain = (
        Sequences(
            [1, 40, 300],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=KVDType.BFLOAT16,
            cache_dtype=cache_dtype,
            page_size=page_size,
            library=each,
        )
        for each in (library, None)
    )
    spans = ((0, 0, 1), (1, 0, 40), (2, 0, 300))
    plain.step(*spans)
    for index, output in enumerate(native.step(*spans)):
        assert all(map(torch.equal, native.stored(index), plain.stored(index))), "one type, one way to store"
        assert torch.allclose(output.double(), native.by_definition(index, is_stored=True), atol=TOLERANCE)


@pytest.mark.parametrize(("sliding_window", "page_size"), [(1, 16), (7, 16), (16, 16), (550, 16), (100, 24), (4000, 16)])
def test_it_computes_attention_in_a_window(library: NativeLibrary, sliding_window: int, page_size: int) -> None:
    sequences = Sequences(
        [1, 40, 600],
        num_heads=4,
        num_kv_heads=2,
        dtype=KVDType.BFLOAT16,
        sliding_window=sliding_window,
        page_size=page_size,
        library=library,
    )
    for index, output in enumerate(sequences.step((0, 0, 1), (1, 0, 40), (2, 0, 600))):
        assert torch.allclose(output.double(), sequences.by_definition(index), atol=TOLERANCE)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("sliding_window", [None, 100, 512])
def test_neither_other_rows_nor_chunks_nor_threads_change_a_bit(
    library: NativeLibrary, sliding_window: int | None, cache_dtype: KVDType
) -> None:
    lengths = [300, 33, 1100, 1, 257]
    sequences = Sequences(
        lengths,
        num_heads=9,
        num_kv_heads=3,
        dtype=KVDType.BFLOAT16,
        cache_dtype=cache_dtype,
        sliding_window=sliding_window,
        library=library,
    )
    whole = [sequences.whole(index) for index in range(len(lengths))]
    last_tokens = [(index, length - 1, length) for index, length in enumerate(lengths)]
    mixed = [(0, 200, 300), (2, 1090, 1100), (1, 0, 33), (4, 250, 257), (3, 0, 1)]
    crowd = last_tokens * 5  # enough for each thread to take all heads at once
    for num_threads in (2, 1):
        torch.set_num_threads(num_threads)
        for spans in (last_tokens, last_tokens[::-1], last_tokens[1:3], mixed, crowd, *([span] for span in last_tokens)):
            for (index, first, end), output in zip(spans, sequences.step(*spans), strict=True):
                assert torch.equal(output, whole[index][first:end])


def test_only_the_own_layer_and_slots_are_written(library: NativeLibrary) -> None:
    sequences = Sequences([20, 20], num_heads=4, num_kv_heads=2, dtype=KVDType.BFLOAT16, library=library)
    sequences.step((0, 0, 20))
    tensor = sequences.cache.tensor
    entered, others = list(sequences.page_ids[0]), list(sequences.page_ids[1])
    assert tensor[others].isnan().all(), "another sequence's pages stay as they were"
    assert not tensor[entered][:, [0, 2]].any(), "entered pages are cleared in every layer"
    stored = tensor[entered][:, LAYER].transpose(0, 1).flatten(1, 2)  # [2, num_slots, num_kv_heads, head_dim]
    assert torch.equal(stored[0, :20], sequences.key[0])
    assert torch.equal(stored[1, :20], sequences.value[0])
    assert not stored[:, 20:].any()


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 112, 256])
def test_queries_and_keys_are_rotated_as_torch_rotates_them(
    library: NativeLibrary, head_dim: int, cache_dtype: KVDType
) -> None:
    length = 24
    angles = torch.rand(length, head_dim // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin())
    native, plain = (
        Sequences(
            [length],
            num_heads=6,
            num_kv_heads=2,
            dtype=KVDType.BFLOAT16,
            cache_dtype=cache_dtype,
            head_dim=head_dim,
            library=each,
        )
        for each in (library, None)
    )
    (output,), (expected,) = (sequences.step((0, 0, length), rotation=rotation) for sequences in (native, plain))
    assert torch.allclose(output, expected, atol=2 * TOLERANCE)  # either may be as far from what is exact
    assert all(map(torch.equal, native.stored(0), plain.stored(0)))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_no_number_stays_visible_in_a_cache_of_int8(library: NativeLibrary, poison: float) -> None:
    sequences = Sequences(
        [20, 20], num_heads=4, num_kv_heads=2, dtype=KVDType.BFLOAT16, cache_dtype=KVDType.INT8, library=library
    )
    sequences.key[0][5, 1, 3] = poison
    ours, others = sequences.step((0, 0, 20), (1, 0, 20))
    heads = ours.view(20, 4, -1)
    assert heads[5:, 2:].isnan().all(), "that key-value head, from that token on"
    assert not heads[:5].isnan().any()
    assert not heads[:, :2].isnan().any()
    assert not others.isnan().any()
