"""Random sequences over one paged cache, and attention to them step by step and by its definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_engine.attention import AttentionBackend, AttentionRow, TorchAttention
from llm_engine.cuda.paged_attention import PagedAttention
from llm_engine.cuda.paged_kernel import PagedKernel
from llm_engine.device import CPU
from llm_engine.kv_cache import TORCH_DTYPES, KVCache
from llm_engine.native.library import NativeLibrary
from llm_engine.native_attention import NativeAttention
from llm_engine.native_prefill_attention import NativePrefillAttention
from llm_engine.rotation import Rotation
from serving_core.ids import PageId
from serving_core.kv_page_layout import KVDType, KVPageLayout

NUM_LAYERS, PAGE_SIZE, LAYER, SCALE = 3, 16, 1, 0.15


class Sequences:
    """Random queries, keys and values of some sequences, of ``dtype``, whose pages are scattered over one cache, of
    ``cache_dtype`` if that is another. With ``library`` the native back end attends, that
    of prefill with ``is_prefill``; with ``kernel`` that kernel over pages,
    on ``device``, where all tensors are then."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        num_heads: int,
        num_kv_heads: int,
        dtype: KVDType,
        cache_dtype: KVDType | None = None,
        sliding_window: int | None = None,
        page_size: int = PAGE_SIZE,
        head_dim: int = 64,
        library: NativeLibrary | None = None,
        is_prefill: bool = False,
        kernel: PagedKernel | None = None,
        device: torch.device = CPU,
    ) -> None:
        layout = KVPageLayout(
            num_layers=NUM_LAYERS,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=cache_dtype or dtype,
        )
        num_pages = sum(layout.num_pages_for(length) for length in lengths)
        self.cache = KVCache(layout, num_pages, device=device)
        left_over = self.cache.tensor if self.cache.scales is None else self.cache.scales
        left_over.copy_(torch.tensor(float("nan")))  # what a page's last user left must never be seen
        self.sliding_window = sliding_window
        windows = [None, sliding_window, 1]
        self.attention: AttentionBackend
        if kernel is not None:
            self.attention = PagedAttention(self.cache, kernel, scale=SCALE, sliding_windows=windows)
        elif library is None:
            self.attention = TorchAttention(self.cache, scale=SCALE, sliding_windows=windows)
        elif is_prefill:
            self.attention = NativePrefillAttention(self.cache, library, scale=SCALE, sliding_windows=windows)
        else:
            self.attention = NativeAttention(self.cache, library, scale=SCALE, sliding_windows=windows)

        generator = torch.Generator().manual_seed(num_heads * 100 + sum(lengths))
        shuffled = iter(torch.randperm(num_pages, generator=generator).tolist())
        self.page_ids = [tuple(PageId(next(shuffled)) for _ in range(layout.num_pages_for(length))) for length in lengths]
        torch_dtype = TORCH_DTYPES[dtype]
        self.query = [torch.randn(n, num_heads, head_dim, generator=generator).to(device, torch_dtype) for n in lengths]
        self.key = [torch.randn(n, num_kv_heads, head_dim, generator=generator).to(device, torch_dtype) for n in lengths]
        self.value = [torch.randn(n, num_kv_heads, head_dim, generator=generator).to(device, torch_dtype) for n in lengths]

    def step(self, *spans: tuple[int, int, int], rotation: Rotation | None = None) -> list[Tensor]:
        """One step over (sequence, first token, end): each span's result [num_tokens, num_heads * head_dim]."""
        rows = [
            AttentionRow(
                num_tokens=end - first,
                start_position=first,
                page_ids=self.page_ids[index][: self.cache.layout.num_pages_for(end)],
            )
            for index, first, end in spans
        ]
        num_tokens = sum(row.num_tokens for row in rows)

        def batched(tensors: list[Tensor]) -> Tensor:
            batch = torch.cat([tensors[index][first:end] for index, first, end in spans])
            return torch.cat([batch, batch.new_ones(-num_tokens % 4, *batch.shape[1:])])

        query, key, value = batched(self.query), batched(self.key), batched(self.value)
        output = self.attention.begin_step(rows).attend(LAYER, query, key, value, rotation)
        assert output.shape == (len(query), query.shape[1] * query.shape[2])
        assert not output[num_tokens:].any()
        return list(torch.split(output[:num_tokens], [row.num_tokens for row in rows]))

    def stored(self, index: int) -> tuple[Tensor, Tensor]:
        """The sequence's keys and values as the cache holds them, in float32: [num_slots, num_kv_heads, head_dim] each."""
        return self.cache.gather(LAYER, torch.tensor(self.page_ids[index]), torch.float32)

    def whole(self, index: int) -> Tensor:
        (output,) = self.step((index, 0, len(self.query[index])))
        return output

    def by_definition(self, index: int, *, is_stored: bool = False) -> Tensor:
        """[num_tokens, num_heads * head_dim] in float64, without pages, masks or blocks; ``is_stored``: of the keys and values
        that the cache holds instead of those that were put into it."""
        key, value = self.stored(index) if is_stored else (self.key[index], self.value[index])
        query, key, value = self.query[index].double(), key.double(), value.double()
        heads_per_kv = query.shape[1] // key.shape[1]
        output = torch.empty_like(query)
        for token in range(len(query)):
            for head in range(query.shape[1]):
                first = 0 if self.sliding_window is None else max(0, token + 1 - self.sliding_window)
                keys = key[first : token + 1, head // heads_per_kv]
                weights = torch.softmax(keys @ query[token, head] * SCALE, dim=0)
                output[token, head] = weights @ value[first : token + 1, head // heads_per_kv]
        return output.flatten(1)
