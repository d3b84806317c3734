"""The paged KV cache: its memory, as the numbers it holds and as each page's bytes. Knows nothing of who owns a page."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from llm_engine.cuda.device_memory import room_for
from llm_engine.cuda.staged_bytes import StagedBytes
from llm_engine.device import CPU
from llm_engine.huge_pages import huge_pages
from llm_engine.kv_numbers import dequantize, quantize, to_cache_type
from serving_core.byte_stride import ByteStride
from serving_core.ids import PageId
from serving_core.kv_page_layout import KVDType, KVPageLayout

TORCH_DTYPES = {
    KVDType.FLOAT32: torch.float32,
    KVDType.BFLOAT16: torch.bfloat16,
    KVDType.FLOAT16: torch.float16,
    KVDType.INT8: torch.int8,
    KVDType.FP8: torch.float8_e4m3fn,
}


class KVCache:
    """``tensor`` has the numbers as they are held, [num_pages, num_layers, 2 (key, value), page_size, num_kv_heads, head_dim].
    ``scales`` is None, or for int8 and fp8 what the numbers of each head are to be multiplied by, float32 [num_pages,
    num_layers, 2, page_size, num_kv_heads].

    Both lie in one block of memory: a page is ``layout.page_bytes`` of it, first its numbers, then its scales. So with scales
    the pages of either tensor are ``layout.page_bytes`` apart, which leaves gaps; within a page there are none.

    It starts as zeros that are written, so that all of its memory is taken at the start and none under load. Different pages
    may be read and written from different threads at once; keeping two users off one page is the page pool's matter.

    With ``has_spare_page`` there is one page more, behind the others, for the padding of steps.
    """

    def __init__(
        self, layout: KVPageLayout, num_pages: int, *, device: torch.device = CPU, has_spare_page: bool = False
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        num_held = num_pages + int(has_spare_page)
        memory = _memory(num_held * layout.page_bytes, device)
        self._staged = None if device == CPU else StagedBytes(memory)
        self._pages = memory.view(num_held, layout.page_bytes)
        shape = (layout.num_layers, 2, layout.page_size, layout.num_kv_heads)
        numbers = self._pages[:, : layout.number_bytes].view(TORCH_DTYPES[layout.dtype])
        self.tensor: Tensor = numbers.view(num_held, *shape, layout.head_dim)
        self.scales: Tensor | None = None
        if layout.dtype.has_scales:
            self.scales = self._pages[:, layout.number_bytes :].view(torch.float32).view(num_held, *shape)

    @property
    def spare_page(self) -> PageId:
        """Belongs to nobody; what is in it are finite numbers without meaning."""
        assert len(self._pages) > self.num_pages, "the cache was made with a spare page"
        return PageId(self.num_pages)

    def max_row_pages(self, max_model_len: int) -> int:
        """The most pages that a sequence of a model with this window may have."""
        return min(self.num_pages, self.layout.num_pages_for(max_model_len))

    def clear(self, page_id: PageId) -> None:
        """Make all of the page zeros."""
        self._pages[page_id].zero_()

    def store(self, layer: int, pages: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put each token's heads, [num_tokens, num_kv_heads, head_dim], into its slot of its page, int64 [num_tokens]; to the
        nearest numbers that the cache holds (see ``kv_numbers``)."""
        for side, heads in enumerate((key, value)):
            if self.scales is None:
                self.tensor[:, layer, side].index_put_((pages, slots), to_cache_type(heads, self.tensor.dtype))
            else:
                numbers, scales = quantize(heads, self.tensor.dtype)
                # As bytes, since torch puts and selects no float8.
                self.tensor[:, layer, side].view(torch.int8).index_put_((pages, slots), numbers.view(torch.int8))
                self.scales[:, layer, side].index_put_((pages, slots), scales)

    def gather(self, layer: int, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of ``pages``, int64 [num_pages], one after another in a copy of their own: each [num_pages *
        page_size, num_kv_heads, head_dim] of ``dtype``."""
        return self._gather_side(layer, 0, pages, dtype), self._gather_side(layer, 1, pages, dtype)

    def page_memory(self, page_id: PageId) -> memoryview:
        """The page's bytes, read-only. In host memory without a copy: they change when the page does."""
        page = self._part(page_id, 0, self.layout.page_bytes, None)
        return self._staged.read(page) if self._staged is not None else page.numpy().data.toreadonly()

    def write(self, page_id: PageId, offset: int, payload: memoryview, stride: ByteStride | None = None) -> None:
        """Copy ``payload`` into the page, ``offset`` bytes from its start: in one piece or, with a ``stride``, in runs, which
        it fills wholly. Bytes between the runs stay as they are."""
        part = self._part(page_id, offset, payload.nbytes, stride)
        if self._staged is not None:
            self._staged.write(part, payload)
        else:
            part.numpy()[...] = np.frombuffer(payload, dtype=np.uint8).reshape(part.shape)

    def _gather_side(self, layer: int, side: int, pages: Tensor, dtype: torch.dtype) -> Tensor:
        held = self.tensor[:, layer, side]
        if self.scales is None:
            return held.index_select(0, pages).flatten(0, 1).to(dtype)
        numbers = held.view(torch.int8).index_select(0, pages).view(held.dtype).flatten(0, 1)
        return dequantize(numbers, self.scales[:, layer, side].index_select(0, pages).flatten(0, 1), dtype)

    def _part(self, page_id: PageId, offset: int, num_bytes: int, stride: ByteStride | None) -> Tensor:
        """A view of a page's bytes, uint8 [num_bytes] or, with a stride, [num_runs, run_bytes]."""
        assert 0 <= page_id < self.num_pages
        end = offset + (stride.extent(num_bytes) if stride else num_bytes)
        assert 0 <= offset <= end <= self.layout.page_bytes, "the payload lies within one page"
        part = self._pages[page_id, offset:end]
        return part.as_strided((stride.num_runs(num_bytes), stride.run_bytes), (stride.step_bytes, 1)) if stride else part


def _memory(num_bytes: int, device: torch.device) -> Tensor:
    """Zeros, uint8 [num_bytes]."""
    if device != CPU:
        with room_for(device, num_bytes, "the KV cache takes", "give a smaller --kv-cache-memory-bytes"):
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return huge_pages(num_bytes).zero_()  # a long sequence's pages lie all over the cache
