"""The kernels of flash-attn and flash-attn-4 against the definition of attention, on a CUDA device."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from llm_engine.attention import AttentionRow
from llm_engine.cuda.graph import GraphRecorder
from llm_engine.cuda.paged_attention import PagedAttention
from llm_engine.cuda.paged_places import PagedPlaces
from serving_core.kv_page_layout import KVDType
from tests.gpu.cuda_device import DEVICE, KERNELS, NEEDS_CUDA, kernel_or_skip
from tests.unit.llm_engine.attention_sequences import LAYER, Sequences

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]
LENGTHS = [1, 40, 257, 600]


def sequences_with(
    name: str, *, num_heads: int = 8, num_kv_heads: int = 2, head_dim: int = 64, sliding_window: int | None = None
) -> Sequences:
    kernel = kernel_or_skip(name, head_dim=head_dim)
    return Sequences(
        LENGTHS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dtype=KVDType.BFLOAT16,
        sliding_window=sliding_window,
        page_size=kernel.page_size,
        head_dim=head_dim,
        kernel=kernel,
        device=DEVICE,
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sliding_window", [None, 1, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 64), (4, 4, 128), (9, 3, 64), (4, 1, 256)])
def test_it_computes_attention(name: str, num_heads: int, num_kv_heads: int, head_dim: int, sliding_window: int | None) -> None:
    sequences = sequences_with(
        name, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, sliding_window=sliding_window
    )
    expected = [sequences.by_definition(index) for index in range(len(LENGTHS))]
    # 1. Prompts beside one another, and one in chunks.
    for output, definition in zip(sequences.step(*((i, 0, n) for i, n in enumerate(LENGTHS))), expected, strict=True):
        assert torch.allclose(output.double(), definition, atol=2e-2)
    chunks = [sequences.step((3, first, end))[0] for first, end in pairwise([0, 1, 255, 256, 300, 600])]
    assert torch.allclose(torch.cat(chunks).double(), expected[3], atol=2e-2)
    # 2. A token of each.
    for output, definition in zip(sequences.step(*((i, n - 1, n) for i, n in enumerate(LENGTHS))), expected, strict=True):
        assert torch.allclose(output.double(), definition[-1:], atol=2e-2)


@pytest.mark.parametrize("name", KERNELS)
def test_other_rows_change_no_bit(name: str) -> None:
    sequences = sequences_with(name)
    sequences.step(*((i, 0, n) for i, n in enumerate(LENGTHS)))
    last = [(index, length - 1, length) for index, length in enumerate(LENGTHS)]
    alone = [sequences.step(span)[0] for span in last]
    for spans in (last, last[::-1], last[1:3]):
        for (index, _, _), output in zip(spans, sequences.step(*spans), strict=True):
            assert torch.equal(output, alone[index])


@pytest.mark.parametrize("name", KERNELS)
def test_a_captured_step_reads_what_is_put_into_its_places(name: str) -> None:
    sequences = sequences_with(name)
    for index, length in enumerate(LENGTHS):
        sequences.step((index, 0, length))
    attention = sequences.attention
    assert isinstance(attention, PagedAttention)
    layout, width = sequences.cache.layout, max(len(pages) for pages in sequences.page_ids)

    def places(index: int) -> PagedPlaces:
        length = LENGTHS[index]
        row = AttentionRow(num_tokens=1, start_position=length - 1, page_ids=sequences.page_ids[index])
        return PagedPlaces.of([row], layout, num_table_pages=width)

    def last(tensors: list[Tensor], index: int) -> Tensor:
        return tensors[index][-1:]

    static = places(3).to(DEVICE)
    step = attention.step_at(static)
    query, key, value = (last(tensors, 3).clone() for tensors in (sequences.query, sequences.key, sequences.value))
    output = torch.empty(1, query.shape[1] * query.shape[2], dtype=query.dtype, device=DEVICE)

    def compute() -> None:
        output.copy_(step.attend(LAYER, query, key, value, None))

    replay = GraphRecorder(DEVICE).record(compute)
    for index in range(len(LENGTHS)):
        (expected,) = sequences.step((index, LENGTHS[index] - 1, LENGTHS[index]))
        static.copy_(places(index))
        for tensor, tensors in ((query, sequences.query), (key, sequences.key), (value, sequences.value)):
            tensor.copy_(last(tensors, index))
        replay()
        assert torch.equal(output, expected)
