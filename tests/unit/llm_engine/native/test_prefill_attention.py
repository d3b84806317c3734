"""Attention of prompts on the native kernels against its definition, and its independence of the batch, of chunks, of threads
and of what masked places hold."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from llm_engine.native.library import NativeLibrary
from llm_engine.rotation import Rotation
from serving_core.kv_page_layout import KVDType
from tests.unit.llm_engine.attention_sequences import LAYER, PAGE_SIZE, Sequences

TOLERANCE = 2e-2
SIZES = [
    *[(9, 3, 64), (4, 1, 32), (7, 1, 80), (6, 3, 96), (8, 2, 112), (8, 2, 128), (4, 1, 256)],
    *[(64, 8, 64), (5, 5, 16), (48, 1, 8)],
]
"""Heads, key-value heads, width of a head."""


def prompts(
    library: NativeLibrary,
    lengths: list[int],
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    page_size: int = PAGE_SIZE,
    sliding_window: int | None = None,
    cache_dtype: KVDType = KVDType.BFLOAT16,
) -> Sequences:
    return Sequences(
        lengths,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=KVDType.BFLOAT16,
        cache_dtype=cache_dtype,
        page_size=page_size,
        sliding_window=sliding_window,
        library=library,
        is_prefill=True,
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SIZES)
@pytest.mark.parametrize("page_size", [1, 16, 24, 256])
def test_it_computes_attention(
    library: NativeLibrary, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int
) -> None:
    sequences = prompts(
        library,
        [1, 40, 17, 8, 129],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
    )
    for index, output in enumerate(sequences.step((0, 0, 1), (1, 0, 40), (2, 0, 17), (3, 0, 8), (4, 0, 129))):
        assert torch.allclose(output.double(), sequences.by_definition(index), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("sliding_window", "page_size"), [(None, 16), (1, 16), (7, 16), (16, 16), (550, 16), (100, 24), (4000, 16)]
)
def test_it_computes_long_rows_and_windows(library: NativeLibrary, sliding_window: int | None, page_size: int) -> None:
    sequences = prompts(library, [1, 40, 600], num_heads=4, num_kv_heads=2, sliding_window=sliding_window, page_size=page_size)
    for index, output in enumerate(sequences.step((0, 0, 1), (1, 0, 40), (2, 0, 600))):
        assert torch.allclose(output.double(), sequences.by_definition(index), atol=TOLERANCE)


@pytest.mark.parametrize("cache_dtype", [KVDType.FLOAT16, KVDType.INT8])
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (80, 24)])
def test_it_reads_a_cache_of_another_type_as_torch_does(
    library: NativeLibrary, cache_dtype: KVDType, head_dim: int, page_size: int
) -> None:
    native = prompts(library, [300, 41], head_dim=head_dim, page_size=page_size, cache_dtype=cache_dtype)
    plain = Sequences(
        [300, 41],
        num_heads=9,
        num_kv_heads=3,
        dtype=KVDType.BFLOAT16,
        cache_dtype=cache_dtype,
        head_dim=head_dim,
        page_size=page_size,
    )
    outputs, expected = (sequences.step((0, 0, 300), (1, 0, 41)) for sequences in (native, plain))
    for index in range(2):
        assert torch.allclose(outputs[index], expected[index], atol=TOLERANCE)
        assert torch.allclose(outputs[index].double(), plain.by_definition(index), atol=2 * TOLERANCE)
    chunks = [native.step((0, first, first + 50))[0] for first in range(0, 300, 50)]
    assert torch.equal(torch.cat(chunks), outputs[0])


def test_tops_that_rise_and_fall_are_corrected(library: NativeLibrary) -> None:
    """Where scores differ by hundreds, from one chunk of keys to the next, too, a sum without correction would overflow."""
    sequences = prompts(library, [900], num_heads=2, num_kv_heads=1)
    sequences.key[0] *= torch.linspace(-6, 6, 900).view(-1, 1, 1).bfloat16()
    sequences.query[0] *= 20
    output = sequences.whole(0)
    assert torch.allclose(output.double(), sequences.by_definition(0), atol=5 * TOLERANCE)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("sliding_window", "page_size", "head_dim"), [(None, 16, 64), (1, 16, 64), (100, 24, 80), (256, 16, 64), (700, 16, 64)]
)
def test_neither_chunks_nor_other_rows_nor_threads_nor_pages_change_a_bit(
    library: NativeLibrary, sliding_window: int | None, page_size: int, head_dim: int
) -> None:
    sequences = prompts(library, [300, 33, 1100, 1, 257], head_dim=head_dim, sliding_window=sliding_window, page_size=page_size)
    whole = [sequences.whole(index) for index in range(5)]

    # 1. One sequence, cut differently.
    edges = [[*range(0, 1100, chunk), 1100] for chunk in (7, 16, 100, 512)]
    for cut in (*edges, [0, 1, 2, 3, 511, 512, 513, 1099, 1100], [0, 255, 256, 257, 1100]):
        chunks = [sequences.step((2, first, end))[0] for first, end in pairwise(cut)]
        assert torch.equal(torch.cat(chunks), whole[2])
    ones = [sequences.step((0, position, position + 1))[0] for position in range(300)]
    assert torch.equal(torch.cat(ones), whole[0])

    # 2. Beside others, with one thread and with two.
    last_tokens = [(index, len(output) - 1, len(output)) for index, output in enumerate(whole)]
    mixed = [(0, 200, 300), (2, 1090, 1100), (1, 0, 33), (4, 250, 257), (3, 0, 1)]
    for num_threads in (2, 1):
        torch.set_num_threads(num_threads)
        for spans in (last_tokens, last_tokens[::-1], last_tokens[1:3], mixed, *([span] for span in last_tokens)):
            for (index, first, end), output in zip(spans, sequences.step(*spans), strict=True):
                assert torch.equal(output, whole[index][first:end])

    # 3. In other pages.
    sequences.page_ids[2] = sequences.page_ids[2][::-1]
    assert torch.equal(sequences.whole(2), whole[2])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), 1e38])
def test_what_lies_beyond_a_rows_keys_is_never_seen(library: NativeLibrary, garbage: float) -> None:
    sequences = prompts(library, [300])
    whole = sequences.whole(0)
    page, slot = divmod(150, PAGE_SIZE)
    sequences.cache.tensor[sequences.page_ids[0][page], LAYER, :, slot:] = garbage
    (output,) = sequences.step((0, 140, 150))
    assert torch.equal(output, whole[140:150])


def test_what_is_no_number_reaches_those_who_see_it(library: NativeLibrary) -> None:
    sequences = prompts(library, [70])
    sequences.key[0][40, 1, 5] = float("nan")
    output = sequences.whole(0).view(70, 9, 64)
    assert output[40:, 3:6].isnan().all()
    assert not output[:40].isnan().any()
    assert not output[:, :3].isnan().any()
    assert not output[:, 6:].isnan().any()


@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 112, 256])
def test_queries_and_keys_are_rotated_as_torch_rotates_them(library: NativeLibrary, head_dim: int) -> None:
    length = 24
    angles = torch.rand(length, head_dim // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin())
    native = prompts(library, [length], num_heads=6, num_kv_heads=2, head_dim=head_dim)
    plain = Sequences([length], num_heads=6, num_kv_heads=2, dtype=KVDType.BFLOAT16, head_dim=head_dim)
    (output,), (expected,) = (sequences.step((0, 0, length), rotation=rotation) for sequences in (native, plain))
    assert torch.allclose(output, expected, atol=TOLERANCE)
    assert torch.equal(native.cache.tensor[:, LAYER].nan_to_num(), plain.cache.tensor[:, LAYER].nan_to_num())
