"""Attention of prompts on the native kernels. Queries, and what comes out, are bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from llm_engine.attention import AttentionRow, clear_entered_pages
from llm_engine.kv_cache import KVCache
from llm_engine.native.library import CACHE_TYPES, NativeLibrary
from llm_engine.native.prompt_places import DIM_MULTIPLE, KEY_MULTIPLE, PromptPlaces
from llm_engine.native_step import NativeStep, cache_slots, page_tables
from llm_engine.padding import padded


class NativePrefillAttention:
    """See ``AttentionBackend``. All of a row's keys and values are brought in order before its tokens attend to them, which
    costs as much as a few tokens do: so it is for prefill's rows of many tokens."""

    def __init__(self, cache: KVCache, library: NativeLibrary, *, scale: float, sliding_windows: Sequence[int | None]) -> None:
        assert cache.tensor.dtype in CACHE_TYPES
        assert len(sliding_windows) == cache.layout.num_layers
        self._cache = cache
        self._library = library
        self._scale = scale
        self._sliding_windows = tuple(sliding_windows)

    def begin_step(self, rows: Sequence[AttentionRow]) -> NativeStep:
        clear_entered_pages(self._cache, rows)
        attend = functools.partial(self._attend, _prompt_places(rows, self._cache))
        return NativeStep(self._cache, self._library, cache_slots(rows, self._cache), attend)

    def _attend(self, prompts: PromptPlaces, layer: int, query: Tensor) -> Tensor:
        return self._library.attend_prompts(
            query,
            cache=self._cache.tensor,
            layer=layer,
            prompts=prompts,
            scales=self._cache.scales,
            scale=self._scale,
            sliding_window=self._sliding_windows[layer],
        )


def _prompt_places(rows: Sequence[AttentionRow], cache: KVCache) -> PromptPlaces:
    num_kv_heads, head_dim = cache.tensor.shape[4:]
    num_packed = sum(padded(row.num_keys, KEY_MULTIPLE) for row in rows)
    return PromptPlaces(
        page_ids=page_tables(rows),
        tables=torch.tensor([0, *accumulate(len(row.page_ids) for row in rows[:-1])], dtype=torch.int32),
        first_tokens=torch.tensor([0, *accumulate(row.num_tokens for row in rows)], dtype=torch.int32),
        num_keys=torch.tensor([row.num_keys for row in rows], dtype=torch.int32),
        packed=torch.empty(num_packed, num_kv_heads, 2, padded(head_dim, DIM_MULTIPLE), dtype=torch.bfloat16),
    )
