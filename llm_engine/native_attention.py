"""Attention on the native kernels, which read keys and values from the pages where they lie. For bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.attention import AttentionRow, clear_entered_pages
from llm_engine.kv_cache import KVCache
from llm_engine.native.library import NativeLibrary
from llm_engine.native.step_places import StepPlaces
from llm_engine.rotation import Rotation


class NativeAttention:
    """See ``AttentionBackend``. Every token of a row is a query of its own, over the keys up to itself: the cost of a row grows
    with its tokens times its keys, so it is for decode's rows of one or a few tokens."""

    def __init__(self, cache: KVCache, library: NativeLibrary, *, scale: float, sliding_windows: Sequence[int | None]) -> None:
        assert cache.tensor.dtype is torch.bfloat16
        assert len(sliding_windows) == cache.layout.num_layers
        self._cache = cache
        self._library = library
        self._scale = scale
        self._sliding_windows = tuple(sliding_windows)

    def begin_step(self, rows: Sequence[AttentionRow]) -> _NativeStep:
        clear_entered_pages(self._cache, rows)
        return _NativeStep(self._cache, self._library, _places(rows, self._cache), self._scale, self._sliding_windows)


class _NativeStep:
    def __init__(
        self,
        cache: KVCache,
        library: NativeLibrary,
        places: StepPlaces,
        scale: float,
        sliding_windows: tuple[int | None, ...],
    ) -> None:
        self._cache = cache.tensor
        self._library = library
        self._places = places
        self._scale = scale
        self._sliding_windows = sliding_windows

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation | None) -> Tensor:
        num_tokens = len(self._places.slots)
        rotated = self._library.rotate_and_store(
            query[:num_tokens],
            key[:num_tokens],
            value[:num_tokens],
            None if rotation is None else (rotation.cos[:num_tokens], rotation.sin[:num_tokens]),
            cache=self._cache,
            layer=layer,
            places=self._places,
        )
        attended = self._library.attend(
            rotated,
            cache=self._cache,
            layer=layer,
            places=self._places,
            scale=self._scale,
            sliding_window=self._sliding_windows[layer],
        )
        num_padding = len(query) - num_tokens
        return functional.pad(attended, (0, 0, 0, num_padding)) if num_padding else attended


def _places(rows: Sequence[AttentionRow], cache: KVCache) -> StepPlaces:
    page_size, page_stride, slot_stride = cache.layout.page_size, cache.tensor.stride(0), cache.tensor.stride(3)
    tables, num_keys, slots = [], [], []
    num_pages = 0
    for row in rows:
        for position in range(row.start_position, row.num_keys):
            tables.append(num_pages)
            num_keys.append(position + 1)
            page, slot = divmod(position, page_size)
            slots.append(row.page_ids[page] * page_stride + slot * slot_stride)
        num_pages += len(row.page_ids)
    page_ids = np.fromiter(chain.from_iterable(row.page_ids for row in rows), np.int32, num_pages)
    return StepPlaces(
        page_ids=torch.from_numpy(page_ids),
        tables=torch.tensor(tables, dtype=torch.int32),
        num_keys=torch.tensor(num_keys, dtype=torch.int32),
        slots=torch.tensor(slots),
    )
