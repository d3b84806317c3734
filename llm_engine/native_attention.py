"""Attention of decode on the native kernels, which read keys and values from the pages where they lie. Queries, and what
comes out, are bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from llm_engine.attention import AttentionRow, clear_entered_pages
from llm_engine.kv_cache import KVCache
from llm_engine.native.library import CACHE_TYPES, NativeLibrary
from llm_engine.native.step_places import StepPlaces
from llm_engine.native_step import NativeStep, page_tables


class NativeAttention:
    """See ``AttentionBackend``. Every token of a row is a query of its own, over the keys up to itself: the cost of a row grows
    with its tokens times its keys, so it is for decode's rows of one or a few tokens."""

    def __init__(self, cache: KVCache, library: NativeLibrary, *, scale: float, sliding_windows: Sequence[int | None]) -> None:
        assert cache.tensor.dtype in CACHE_TYPES
        assert len(sliding_windows) == cache.layout.num_layers
        self._cache = cache
        self._library = library
        self._scale = scale
        self._sliding_windows = tuple(sliding_windows)

    def begin_step(self, rows: Sequence[AttentionRow]) -> NativeStep:
        clear_entered_pages(self._cache, rows)
        return NativeStep(self._cache, self._library, rows, functools.partial(self._attend, _step_places(rows)))

    def _attend(self, places: StepPlaces, layer: int, query: Tensor) -> Tensor:
        return self._library.attend(
            query,
            cache=self._cache.tensor,
            layer=layer,
            places=places,
            scales=self._cache.scales,
            scale=self._scale,
            sliding_window=self._sliding_windows[layer],
        )


def _step_places(rows: Sequence[AttentionRow]) -> StepPlaces:
    tables: list[int] = []
    num_keys: list[int] = []
    num_pages = 0
    for row in rows:
        tables += [num_pages] * row.num_tokens
        num_keys += range(row.start_position + 1, row.num_keys + 1)
        num_pages += len(row.page_ids)
    return StepPlaces(
        page_ids=page_tables(rows),
        tables=torch.tensor(tables, dtype=torch.int32),
        num_keys=torch.tensor(num_keys, dtype=torch.int32),
    )
