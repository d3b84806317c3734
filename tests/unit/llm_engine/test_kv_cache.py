from __future__ import annotations

import pytest
import torch

from llm_engine.kv_cache import KVCache
from serving_core.ids import PageId
from serving_core.kv_page_layout import KVDType, KVPageLayout


@pytest.fixture(params=list(KVDType))
def cache(request: pytest.FixtureRequest) -> KVCache:
    layout = KVPageLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=request.param)
    return KVCache(layout, 5)


def test_it_starts_as_zeros_in_the_stated_shape(cache: KVCache) -> None:
    assert cache.tensor.shape == (5, 3, 2, 4, 2, 8)
    assert not cache.tensor.any()
    assert cache.tensor[0].nbytes == cache.layout.page_bytes


def test_page_memory_is_the_page_itself_and_read_only(cache: KVCache) -> None:
    memory = cache.page_memory(PageId(2))
    assert memory.nbytes == cache.layout.page_bytes
    assert memory.readonly
    cache.tensor[2] = 1.0
    assert bytes(memory) == bytes(cache.tensor[2].flatten().view(torch.uint8).tolist())


def test_bytes_written_to_another_cache_are_equal_bits(cache: KVCache) -> None:
    other = KVCache(cache.layout, 3)
    cache.tensor[4] = torch.randn(cache.tensor[4].shape).to(cache.tensor.dtype)
    source = cache.page_memory(PageId(4))
    other.writable_page(PageId(0))[:] = source
    assert torch.equal(other.tensor[0], cache.tensor[4])
    assert not other.tensor[1:].any()


def test_neighbours_are_out_of_reach(cache: KVCache) -> None:
    assert cache.writable_page(PageId(4)).nbytes == cache.layout.page_bytes
    with pytest.raises(AssertionError):
        cache.page_memory(PageId(5))
    with pytest.raises(AssertionError):
        cache.page_memory(PageId(-1))
