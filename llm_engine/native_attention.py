"""Attention of decode on the native kernels, which read keys and values from the pages where they lie. Queries, and what
comes out, are bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_engine.attention import AttentionRow, clear_entered_pages
from llm_engine.kv_cache import KVCache
from llm_engine.native.cache_slots import CacheSlots
from llm_engine.native.library import CACHE_TYPES, NativeLibrary
from llm_engine.native.step_places import StepPlaces
from llm_engine.native_step import NativeStep, cache_slots, page_tables


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NativePlaces:
    """Of a step's tokens in the cache: where they put their keys and values, and where they find those of their sequence."""

    slots: CacheSlots
    keys: StepPlaces

    def copy_(self, other: NativePlaces) -> None:
        """Take over the numbers of ``other``, in place."""
        self.slots.copy_(other.slots)
        self.keys.copy_(other.keys)


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
        self.enter(rows)
        return self.step_at(self.places_of(rows))

    def enter(self, rows: Sequence[AttentionRow]) -> None:
        """What ``begin_step`` does to the cache."""
        clear_entered_pages(self._cache, rows)

    def places_of(self, rows: Sequence[AttentionRow]) -> NativePlaces:
        return NativePlaces(slots=cache_slots(rows, self._cache), keys=_step_places(rows))

    def empty_places(self, *, max_tokens: int, max_pages: int) -> NativePlaces:
        """Room for those of any step of up to so many tokens, whose page tables have so many pages together."""
        return NativePlaces(
            slots=CacheSlots.empty(max_tokens=max_tokens, has_scales=self._cache.scales is not None),
            keys=StepPlaces.empty(max_tokens=max_tokens, max_pages=max_pages),
        )

    def step_at(self, places: NativePlaces) -> NativeStep:
        """A step at places whose numbers may change from one use of the step to the next. Clears nothing."""
        return NativeStep(self._cache, self._library, places.slots, functools.partial(self._attend, places.keys))

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
