"""Attention through a kernel that reads keys and values from the pages where they lie, on the cache's device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from llm_engine.attention import AttentionRow, clear_entered_pages
from llm_engine.cuda.paged_kernel import PagedKernel
from llm_engine.cuda.paged_places import PagedPlaces
from llm_engine.kv_cache import KVCache
from llm_engine.rotation import Rotation


class PagedAttention:
    """See ``AttentionBackend``. Its batch invariance is the kernel's, see ``PagedKernel``."""

    def __init__(self, cache: KVCache, kernel: PagedKernel, *, scale: float, sliding_windows: Sequence[int | None]) -> None:
        assert len(sliding_windows) == cache.layout.num_layers
        assert cache.layout.page_size % kernel.page_size_multiple == 0
        self._cache = cache
        self._kernel = kernel
        self._scale = scale
        self._sliding_windows = tuple(sliding_windows)

    def begin_step(self, rows: Sequence[AttentionRow]) -> PagedStep:
        clear_entered_pages(self._cache, rows)
        return self.step_at(PagedPlaces.of(rows, self._cache.layout).to(self._cache.tensor.device))

    def step_at(self, places: PagedPlaces) -> PagedStep:
        """A step over places on the cache's device, whose numbers may change from one use of the step to the next. Clears
        nothing."""
        return PagedStep(self._cache, self._kernel, places, self._scale, self._sliding_windows)


class PagedStep:
    """See ``AttentionStep``."""

    def __init__(
        self,
        cache: KVCache,
        kernel: PagedKernel,
        places: PagedPlaces,
        scale: float,
        sliding_windows: tuple[int | None, ...],
    ) -> None:
        self._cache = cache
        self._kernel = kernel
        self._places = places
        self._scale = scale
        self._sliding_windows = sliding_windows

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation | None) -> Tensor:
        if rotation is not None:
            query, key = rotation(query), rotation(key)
        places = self._places
        num_tokens = places.num_tokens
        self._cache.store(layer, places.pages, places.slots, key[:num_tokens], value[:num_tokens])
        attended = self._kernel(
            query[:num_tokens],
            self._cache.tensor[:, layer, 0],
            self._cache.tensor[:, layer, 1],
            places,
            scale=self._scale,
            sliding_window=self._sliding_windows[layer],
        ).flatten(1)
        num_padding = len(query) - num_tokens
        return functional.pad(attended, (0, 0, 0, num_padding)) if num_padding else attended
