"""What the steps of both native attentions have in common: keys and values go into the cache, then queries attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.attention import AttentionRow
from llm_engine.kv_cache import KVCache
from llm_engine.native.cache_slots import CacheSlots
from llm_engine.native.library import NativeLibrary
from llm_engine.rotation import Rotation


class NativeStep:
    """See ``AttentionStep``. ``attend`` takes a layer and its rotated queries, [num_tokens, num_heads, head_dim], without
    padding, when the step's keys and values are in the cache; it returns [num_tokens, num_heads * head_dim]."""

    def __init__(
        self, cache: KVCache, library: NativeLibrary, slots: CacheSlots, attend: Callable[[int, Tensor], Tensor]
    ) -> None:
        self._cache = cache
        self._library = library
        self._slots = slots
        self._attend = attend

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation | None) -> Tensor:
        num_tokens = self._slots.slots.shape[0]
        num_padding = query.shape[0] - num_tokens
        angles = None if rotation is None else (rotation.cos, rotation.sin)
        if num_padding:
            query, key, value = query[:num_tokens], key[:num_tokens], value[:num_tokens]
            angles = None if angles is None else (angles[0][:num_tokens], angles[1][:num_tokens])
        rotated = self._library.rotate_and_store(
            query,
            key,
            value,
            angles,
            cache=self._cache.tensor,
            layer=layer,
            slots=self._slots,
            scales=self._cache.scales,
        )
        attended = self._attend(layer, rotated)
        return functional.pad(attended, (0, 0, 0, num_padding)) if num_padding else attended


def page_tables(rows: Sequence[AttentionRow]) -> Tensor:
    """Of all rows, one after another, int32 [num_pages]."""
    num_pages = sum(len(row.page_ids) for row in rows)
    return torch.from_numpy(np.fromiter(chain.from_iterable(row.page_ids for row in rows), np.int32, num_pages))


def cache_slots(rows: Sequence[AttentionRow], cache: KVCache) -> CacheSlots:
    """Of all tokens of the rows, one after another."""
    page_size = cache.layout.page_size
    places = [
        (row.page_ids[position // page_size], position % page_size)
        for row in rows
        for position in range(row.start_position, row.num_keys)
    ]

    def offsets(tensor: Tensor) -> Tensor:
        page_stride, slot_stride = tensor.stride(0), tensor.stride(3)
        return torch.tensor([page * page_stride + slot * slot_stride for page, slot in places])

    return CacheSlots(slots=offsets(cache.tensor), scale_slots=None if cache.scales is None else offsets(cache.scales))
