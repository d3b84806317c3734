"""The paged KV cache: one tensor, and each page's bytes. Knows nothing of who owns a page."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from serving_core.ids import PageId
from serving_core.kv_page_layout import KVDType, KVPageLayout

TORCH_DTYPES = {
    KVDType.FLOAT32: torch.float32,
    KVDType.BFLOAT16: torch.bfloat16,
    KVDType.FLOAT16: torch.float16,
}


class KVCache:
    """``tensor`` is [num_pages, num_layers, 2 (key, value), page_size, num_kv_heads, head_dim], so that a page is one
    contiguous block of ``layout.page_bytes``.

    It starts as zeros that are written, so that all of its memory is taken at the start and none under load. Different pages
    may be read and written from different threads at once; keeping two users off one page is the page pool's matter.
    """

    def __init__(self, layout: KVPageLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        shape = (num_pages, layout.num_layers, 2, layout.page_size, layout.num_kv_heads, layout.head_dim)
        self.tensor = torch.frombuffer(_memory(num_pages * layout.page_bytes), dtype=TORCH_DTYPES[layout.dtype]).view(shape)
        self.tensor.zero_()
        self._bytes = self.tensor.view(-1).view(torch.uint8).numpy().data  # [num_pages * page_bytes]

    def page_memory(self, page_id: PageId) -> memoryview:
        """The page's bytes, read-only, without a copy. They change when the page does."""
        return self.writable_page(page_id).toreadonly()

    def writable_page(self, page_id: PageId) -> memoryview:
        """The page's bytes, without a copy."""
        assert 0 <= page_id < self.num_pages
        start = page_id * self.layout.page_bytes
        return self._bytes[start : start + self.layout.page_bytes]


def _memory(num_bytes: int) -> mmap.mmap:
    """In huge pages where the system has them: a long sequence's pages lie all over the cache, and finding the memory of each
    takes as long as reading it otherwise."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
