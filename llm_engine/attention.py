"""Attention over the paged cache, behind one interface, and its torch back end for CPUs. Knows pages by number only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.kv_cache import KVCache
from serving_core.ids import PageId

ROW_MULTIPLE = 4
"""Matrix products have a multiple of this many rows: with fewer rows the CPU kernels round differently."""

_KEY_BLOCK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """Consecutive tokens of one sequence. ``page_ids`` covers every position up to the last of them, in order."""

    num_tokens: int
    start_position: int
    page_ids: tuple[PageId, ...]

    @property
    def num_keys(self) -> int:
        return self.start_position + self.num_tokens


class AttentionStep(Protocol):
    """One step's rows, prepared once and used in every layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store keys and values of the step's tokens, then attend causally to each token's whole sequence.

        query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim], rotary embedding applied;
        the tokens of all rows one after another, then any number of padding tokens, which are not stored.
        Returns [num_tokens, num_heads * head_dim], zeros for padding.
        """


class AttentionBackend(Protocol):
    """Attention over one paged cache.

    It is batch-invariant: a token's result depends on its own sequence alone, bit for bit; not on the other rows of the step,
    nor on how its prompt was cut into steps.
    """

    def begin_step(self, rows: Sequence[AttentionRow]) -> AttentionStep:
        """Prepare a step. Clears every page in which a row writes the first slot."""


class TorchAttention:
    """The back end for CPUs: gathers each sequence's pages, then calls torch's fused attention.

    That kernel alone is not batch-invariant: it sums over keys in blocks of 512, and its matrix products round differently with
    the number of keys and for fewer than four query rows (measured in float32 and bfloat16). So every call has a whole number
    of 512-key blocks and a multiple of four query rows; keys beyond a token's position are masked, and add exact zeros.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def begin_step(self, rows: Sequence[AttentionRow]) -> _TorchStep:
        # A page may hold anything from its last user, even NaN, which no mask removes: clear it when a sequence enters it.
        page_size = self._cache.layout.page_size
        for row in rows:
            first_entered = -(-row.start_position // page_size)
            for page_id in row.page_ids[first_entered : -(-row.num_keys // page_size)]:
                self._cache.tensor[page_id].zero_()
        return _TorchStep(self._cache, rows)


class _TorchStep:
    def __init__(self, cache: KVCache, rows: Sequence[AttentionRow]) -> None:
        layout = cache.layout
        self._layout = layout
        # Every (page, layer, key or value) is one row of _pages; every token slot of it one row of _slots.
        self._pages = cache.tensor.view(-1, layout.page_size * layout.num_kv_heads * layout.head_dim)
        self._slots = cache.tensor.view(-1, layout.num_kv_heads * layout.head_dim)

        slots_per_page = layout.num_layers * 2 * layout.page_size
        self._key_slots = torch.tensor(  # [num_tokens], in layer 0
            [
                row.page_ids[position // layout.page_size] * slots_per_page + position % layout.page_size
                for row in rows
                for position in range(row.start_position, row.num_keys)
            ]
        )
        self._groups = [_Group(members, cache) for members in _equal_shapes(rows)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_tokens = len(self._key_slots)
        page_size = self._layout.page_size
        key_slots = self._key_slots + layer * 2 * page_size
        self._slots.index_copy_(0, key_slots, key[:num_tokens].flatten(1))
        self._slots.index_copy_(0, key_slots + page_size, value[:num_tokens].flatten(1))

        output = query.new_zeros(len(query), query.shape[1] * query.shape[2])  # [num_tokens, num_heads * head_dim]
        for group in self._groups:
            output.index_copy_(0, group.tokens, group.attend(self._pages, layer, query))
        return output


class _Group:
    """Rows of one step with the same number of tokens and of key blocks, computed as one stack."""

    def __init__(self, members: Sequence[tuple[int, AttentionRow]], cache: KVCache) -> None:
        layout = cache.layout
        self._num_rows = len(members)
        self._num_tokens = members[0][1].num_tokens
        self._num_keys = _padded(members[0][1].num_keys, _KEY_BLOCK)
        self._num_kv_heads = layout.num_kv_heads
        self._head_dim = layout.head_dim
        self._masks: dict[int, Tensor] = {}

        self.tokens = torch.tensor(  # [num_rows * num_tokens], places in the step
            [first + token for first, row in members for token in range(row.num_tokens)]
        )
        self._positions = torch.tensor(  # [num_rows, num_tokens]
            [range(row.start_position, row.num_keys) for _, row in members]
        )
        # Masked keys beyond the row's own come from its first page: any page would do that holds finite numbers.
        num_pages = layout.num_pages_for(self._num_keys)
        pages = torch.tensor(  # [num_rows, num_pages]
            [(row.page_ids + row.page_ids[:1] * num_pages)[:num_pages] for _, row in members]
        )
        key_pages = pages.flatten() * (layout.num_layers * 2)
        self._page_rows = torch.cat([key_pages, key_pages + 1])  # [2 * num_rows * num_pages], in layer 0

    def attend(self, pages: Tensor, layer: int, query: Tensor) -> Tensor:
        """[num_rows * num_tokens, num_heads * head_dim] for the group's tokens."""
        rows, tokens, kv_heads, head_dim = self._num_rows, self._num_tokens, self._num_kv_heads, self._head_dim
        gathered = pages.index_select(0, self._page_rows + layer * 2).view(2, rows, -1, kv_heads, head_dim)
        key, value = gathered[:, :, : self._num_keys].transpose(2, 3)  # each [num_rows, num_kv_heads, num_keys, head_dim]

        # The query heads that share a key-value head become query rows of it.
        heads_per_kv = query.shape[1] // kv_heads
        grouped = query.index_select(0, self.tokens).view(rows, tokens, kv_heads, heads_per_kv, head_dim)
        grouped = grouped.permute(0, 2, 1, 3, 4).reshape(rows, kv_heads, tokens * heads_per_kv, head_dim)
        mask = self._mask(heads_per_kv, query.dtype)
        grouped = functional.pad(grouped, (0, 0, 0, mask.shape[2] - grouped.shape[2]))
        attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask)
        attended = attended[:, :, : tokens * heads_per_kv].view(rows, kv_heads, tokens, heads_per_kv, head_dim)
        return attended.permute(0, 2, 1, 3, 4).reshape(rows * tokens, kv_heads * heads_per_kv * head_dim)

    def _mask(self, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, 1, padded num_tokens * heads_per_kv, num_keys], added to the scores: 0 or minus infinity."""
        if heads_per_kv not in self._masks:
            is_later = torch.arange(self._num_keys) > self._positions.repeat_interleave(heads_per_kv, 1).unsqueeze(2)
            num_query_rows = _padded(is_later.shape[1], ROW_MULTIPLE)
            mask = torch.zeros(self._num_rows, num_query_rows, self._num_keys, dtype=dtype)
            mask[:, : is_later.shape[1]].masked_fill_(is_later, float("-inf"))
            self._masks[heads_per_kv] = mask.unsqueeze(1)
        return self._masks[heads_per_kv]


def _equal_shapes(rows: Sequence[AttentionRow]) -> list[list[tuple[int, AttentionRow]]]:
    """The rows with the place of their first token, grouped by number of tokens and of key blocks."""
    groups: dict[tuple[int, int], list[tuple[int, AttentionRow]]] = {}
    first = 0
    for row in rows:
        groups.setdefault((row.num_tokens, _padded(row.num_keys, _KEY_BLOCK)), []).append((first, row))
        first += row.num_tokens
    return list(groups.values())


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
