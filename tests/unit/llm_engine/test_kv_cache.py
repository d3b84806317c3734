from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm_engine.kv_cache import KVCache
from serving_core.byte_stride import ByteStride
from serving_core.ids import PageId
from serving_core.kv_page_layout import KVDType, KVPageLayout


@pytest.fixture(params=list(KVDType))
def cache(request: pytest.FixtureRequest) -> KVCache:
    layout = KVPageLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=request.param)
    return KVCache(layout, 5)


def put_numbers(cache: KVCache, page_id: PageId) -> None:
    """Into every slot and layer of the page."""
    layout = cache.layout
    heads = torch.randn(2, layout.page_size, layout.num_kv_heads, layout.head_dim)
    for layer in range(layout.num_layers):
        pages = torch.full((layout.page_size,), page_id)
        cache.store(layer, pages, torch.arange(layout.page_size), heads[0] + layer, heads[1] - layer)


def read(cache: KVCache, page_id: PageId) -> tuple[Tensor, Tensor]:
    """Keys and values of layer 1."""
    return cache.gather(1, torch.tensor([page_id]), torch.float32)


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def page_bytes(cache: KVCache, page: int) -> bytes:
    scales = b"" if cache.scales is None else tensor_bytes(cache.scales[page])
    return tensor_bytes(cache.tensor[page]) + scales


def test_it_starts_as_zeros_in_the_stated_shape(cache: KVCache) -> None:
    assert cache.tensor.shape == (5, 3, 2, 4, 2, 8)
    assert not any(cache.page_memory(PageId(page)).tobytes().strip(b"\0") for page in range(5))
    assert cache.tensor[0].nbytes == cache.layout.number_bytes
    if cache.scales is None:
        assert cache.layout.number_bytes == cache.layout.page_bytes
    else:
        assert cache.scales.shape == (5, 3, 2, 4, 2)
        assert cache.tensor[0].nbytes + cache.scales[0].nbytes == cache.layout.page_bytes


def test_page_memory_is_the_page_itself_and_read_only(cache: KVCache) -> None:
    memory = cache.page_memory(PageId(2))
    assert memory.nbytes == cache.layout.page_bytes
    assert memory.readonly
    put_numbers(cache, PageId(2))
    assert bytes(memory) == page_bytes(cache, 2)
    assert bytes(memory[: cache.layout.number_bytes]) == tensor_bytes(cache.tensor[2]), "numbers come first"
    cache.clear(PageId(2))
    assert not memory.tobytes().strip(b"\0")


def test_bytes_written_to_another_cache_are_equal_bits(cache: KVCache) -> None:
    other = KVCache(cache.layout, 3)
    put_numbers(cache, PageId(4))
    source = cache.page_memory(PageId(4))
    middle = 40
    other.write(PageId(0), middle, source[middle:])
    other.write(PageId(0), 0, source[:middle])
    assert page_bytes(other, 0) == page_bytes(cache, 4)
    assert not any(other.page_memory(PageId(page)).tobytes().strip(b"\0") for page in (1, 2))
    for ours, theirs in zip(read(other, PageId(0)), read(cache, PageId(4)), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any()


def test_neighbours_are_out_of_reach(cache: KVCache) -> None:
    for page in (-1, 5):
        with pytest.raises(AssertionError):
            cache.page_memory(PageId(page))
    page_bytes = cache.layout.page_bytes
    for offset, num_bytes, stride in (
        (-1, 2, None),
        (page_bytes - 1, 2, None),
        (page_bytes - 4, 2, ByteStride(run_bytes=1, step_bytes=4)),
    ):
        with pytest.raises(AssertionError, match="within one page"):
            cache.write(PageId(4), offset, memoryview(b"\1" * num_bytes), stride)
    assert not any(cache.page_memory(PageId(page)).tobytes().strip(b"\0") for page in range(5))


def test_runs_are_written_and_what_lies_between_them_stays(cache: KVCache) -> None:
    size = cache.layout.page_bytes
    cache.write(PageId(1), 0, memoryview(b"." * size))
    cache.write(PageId(1), size - 8, memoryview(b"abcdef"), ByteStride(run_bytes=2, step_bytes=3))
    assert cache.page_memory(PageId(1)).tobytes() == b"." * (size - 8) + b"ab.cd.ef"
    assert not any(cache.page_memory(PageId(page)).tobytes().strip(b"\0") for page in (0, 2, 3, 4))


def test_what_is_stored_is_read_again_from_its_slots_alone(cache: KVCache) -> None:
    # 1. Three tokens into two pages of layer 1; whole numbers below 128 are exact in each type that has two bytes or a scale.
    key = torch.randint(-8, 9, (3, 2, 8)).float()
    value = key.flip(0)
    largest = {KVDType.INT8: 127.0, KVDType.FP8: 448.0}.get(cache.layout.dtype, 8.0)  # so that the scale is 1
    key[:, :, 0], value[:, :, 0], value[:, :, 1] = largest, -8.0, largest
    pages, slots = torch.tensor([3, 3, 0]), torch.tensor([2, 3, 0])
    cache.store(1, pages, slots, key, value)

    # 2. Read page by page, as any type.
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        keys, values = cache.gather(1, torch.tensor([3, 0]), dtype)
        assert keys.dtype is values.dtype is dtype
        assert keys.shape == values.shape == (8, 2, 8)
        assert torch.equal(keys[2:5].float(), key)
        assert torch.equal(values[2:5].float(), value)
        assert not keys[:2].any()
        assert not keys[5:].any()

    # 3. Nothing else was written.
    for layer in (0, 2):
        assert not any(side.any() for side in cache.gather(layer, torch.arange(5), torch.float32))
    assert not any(side.any() for side in cache.gather(1, torch.tensor([1, 2, 4]), torch.float32))
