"""The back end for CUDA on the CPU, with the definition of a kernel in the place of one, which needs a device."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from llm_engine.cuda.paged_places import PagedPlaces
from llm_engine.cuda.plain_paged_kernel import PlainPagedKernel
from serving_core.kv_page_layout import KVDType
from tests.unit.llm_engine.attention_sequences import LAYER, Sequences


@pytest.mark.parametrize("dtype", [KVDType.FLOAT32, KVDType.BFLOAT16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize(("sliding_window", "page_size"), [(None, 16), (7, 16), (1, 24)])
def test_it_computes_attention(
    sliding_window: int | None, page_size: int, num_heads: int, num_kv_heads: int, dtype: KVDType
) -> None:
    sequences = Sequences(
        [1, 40, 70],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dtype=dtype,
        sliding_window=sliding_window,
        page_size=page_size,
        kernel=PlainPagedKernel(),
    )
    tolerance = 1e-5 if dtype is KVDType.FLOAT32 else 2e-2
    expected = [sequences.by_definition(index) for index in range(3)]
    # 1. Prompts, whole and in chunks, beside one another.
    for index, output in enumerate(sequences.step((0, 0, 1), (1, 0, 40), (2, 0, 70))):
        assert torch.allclose(output.double(), expected[index], atol=tolerance)
    chunks = [sequences.step((2, first, end))[0] for first, end in pairwise([0, 15, 16, 33, 70])]
    assert torch.allclose(torch.cat(chunks).double(), expected[2], atol=tolerance)
    # 2. A token of each.
    for index, output in enumerate(sequences.step((0, 0, 1), (1, 39, 40), (2, 69, 70))):
        assert torch.allclose(output.double(), expected[index][-1:], atol=tolerance)


class Watched(PlainPagedKernel):
    """Keeps what it was called with."""

    pages: tuple[Tensor, Tensor]

    def __call__(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        places: PagedPlaces,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        self.pages = key_pages, value_pages
        return super().__call__(query, key_pages, value_pages, places, scale=scale, sliding_window=sliding_window)


def test_the_kernel_reads_the_cache_itself() -> None:
    kernel = Watched()
    sequences = Sequences([20], num_heads=4, num_kv_heads=2, dtype=KVDType.BFLOAT16, kernel=kernel)
    sequences.step((0, 0, 20))
    tensor = sequences.cache.tensor
    for side, pages in enumerate(kernel.pages):
        assert pages.data_ptr() == tensor[:, LAYER, side].data_ptr()
        assert pages.shape == (2, 16, 2, 64)
        assert pages.stride() == tensor[:, LAYER, side].stride()
        assert pages.stride()[1:] == (128, 64, 1), "a page's keys lie side by side, as kernels ask"
