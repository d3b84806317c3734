"""Attention over the paged cache, behind one interface, and its torch back end for CPUs. Knows pages by number only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.kv_cache import KVCache
from llm_engine.padding import padded
from llm_engine.rotation import Rotation
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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation | None) -> Tensor:
        """Rotate queries and keys, store keys and values of the step's tokens, then attend causally to each token's whole
        sequence, or in a layer with a sliding window to its last tokens.

        query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim], of which a token's heads
        lie side by side; the tokens of all rows one after another, then any number of padding tokens, which are not stored.
        Returns [num_tokens, num_heads * head_dim], zeros for padding.
        """


class AttentionBackend(Protocol):
    """Attention over one paged cache.

    It is batch-invariant: a token's result depends on its own sequence alone, bit for bit; not on the other rows of the step,
    nor on how its prompt was cut into steps.
    """

    def begin_step(self, rows: Sequence[AttentionRow]) -> AttentionStep:
        """Prepare a step. Clears every page in which a row writes the first slot."""


def clear_entered_pages(cache: KVCache, rows: Sequence[AttentionRow]) -> None:
    """Clear every page in which a row writes the first slot: it may hold anything from its last user, even NaN, which no mask
    removes."""
    page_size = cache.layout.page_size
    for row in rows:
        first_entered = -(-row.start_position // page_size)
        for page_id in row.page_ids[first_entered : -(-row.num_keys // page_size)]:
            cache.clear(page_id)


class TorchAttention:
    """The back end for CPUs: gathers each sequence's pages, in the type of the queries, then calls torch's fused attention. A
    chunk's own keys and values are read from the cache like all others, so that they are the same however a prompt is cut.

    That kernel alone is not batch-invariant: it sums over keys in blocks of 512, and its matrix products round differently with
    the number of keys and for fewer than four query rows (measured in float32 and bfloat16). So every call has a whole number
    of 512-key blocks and a multiple of four query rows; keys beyond a token's position are masked, and add exact zeros. So do
    whole blocks before a token's window: they are left out, unless an earlier token of the same row needs them.

    Rows that share pages may have more keys together than the cache has tokens: then they are gathered in turns.

    ``scale`` multiplies the products of queries and keys; ``sliding_windows`` has each layer's window in tokens, None for all.
    """

    def __init__(self, cache: KVCache, *, scale: float, sliding_windows: Sequence[int | None]) -> None:
        assert len(sliding_windows) == cache.layout.num_layers
        self._cache = cache
        self._scale = scale
        self._sliding_windows = tuple(sliding_windows)

    def begin_step(self, rows: Sequence[AttentionRow]) -> _TorchStep:
        clear_entered_pages(self._cache, rows)
        return _TorchStep(self._cache, rows, self._scale, self._sliding_windows)


class _TorchStep:
    def __init__(
        self, cache: KVCache, rows: Sequence[AttentionRow], scale: float, sliding_windows: tuple[int | None, ...]
    ) -> None:
        page_size = cache.layout.page_size
        self._cache = cache
        self._scale = scale
        self._sliding_windows = sliding_windows
        places = [(row, *divmod(position, page_size)) for row in rows for position in range(row.start_position, row.num_keys)]
        self._pages = torch.tensor([row.page_ids[page] for row, page, _ in places])  # [num_tokens]
        self._slots = torch.tensor([slot for _, _, slot in places])  # [num_tokens]
        self._groups = {
            window: [_Group(members, cache) for members in _equal_shapes(rows, window, cache)]
            for window in set(sliding_windows)
        }

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation | None) -> Tensor:
        if rotation is not None:
            query, key = rotation(query), rotation(key)
        num_tokens = len(self._slots)
        self._cache.store(layer, self._pages, self._slots, key[:num_tokens], value[:num_tokens])

        output = query.new_zeros(len(query), query.shape[1] * query.shape[2])  # [num_tokens, num_heads * head_dim]
        for group in self._groups[self._sliding_windows[layer]]:
            output.index_copy_(0, group.tokens, group.attend(layer, query, self._scale))
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A row of the step with the place of its first token, and the keys gathered for it: whole blocks that hold all that its
    tokens attend to, from ``first_key``."""

    first_token: int
    row: AttentionRow
    sliding_window: int | None
    first_key: int
    num_keys: int

    @classmethod
    def of(cls, row: AttentionRow, first_token: int, sliding_window: int | None, page_size: int) -> _Member:
        first_key = 0
        if sliding_window is not None:
            multiple = math.lcm(_KEY_BLOCK, page_size)
            first_key = max(0, row.start_position + 1 - sliding_window) // multiple * multiple
        return cls(
            first_token=first_token,
            row=row,
            sliding_window=sliding_window,
            first_key=first_key,
            num_keys=padded(row.num_keys, _KEY_BLOCK) - first_key,
        )

    def page_ids(self, page_size: int) -> tuple[PageId, ...]:
        """The pages of the keys. Masked keys beyond the row's own come from its first page: any page would do that holds finite
        numbers."""
        num_pages = -(-self.num_keys // page_size)
        own = self.row.page_ids[self.first_key // page_size :][:num_pages]
        return own + self.row.page_ids[:1] * (num_pages - len(own))


class _Group:
    """Rows of one step with the same number of tokens and of keys, computed as one stack."""

    def __init__(self, members: Sequence[_Member], cache: KVCache) -> None:
        self._cache = cache
        self._num_rows = len(members)
        self._num_tokens = members[0].row.num_tokens
        self._num_keys = members[0].num_keys
        self._sliding_window = members[0].sliding_window
        self._masks: dict[int, Tensor] = {}

        self.tokens = torch.tensor(  # [num_rows * num_tokens], places in the step
            [member.first_token + token for member in members for token in range(self._num_tokens)]
        )
        self._positions = torch.tensor(  # [num_rows, num_tokens]
            [range(member.row.start_position, member.row.num_keys) for member in members]
        )
        self._first_keys = torch.tensor([member.first_key for member in members])  # [num_rows]
        page_ids = [page_id for member in members for page_id in member.page_ids(cache.layout.page_size)]
        self._pages = torch.tensor(page_ids)  # [num_rows * num_pages]

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """[num_rows * num_tokens, num_heads * head_dim] for the group's tokens."""
        rows, tokens, kv_heads, head_dim = self._num_rows, self._num_tokens, *self._cache.tensor.shape[4:]
        key, value = (  # each [num_rows, num_kv_heads, num_keys, head_dim]
            side.view(rows, -1, kv_heads, head_dim)[:, : self._num_keys].transpose(1, 2)
            for side in self._cache.gather(layer, self._pages, query.dtype)
        )

        # The query heads that share a key-value head become query rows of it.
        heads_per_kv = query.shape[1] // kv_heads
        grouped = query.index_select(0, self.tokens).view(rows, tokens, kv_heads, heads_per_kv, head_dim)
        grouped = grouped.permute(0, 2, 1, 3, 4).reshape(rows, kv_heads, tokens * heads_per_kv, head_dim)
        mask = self._mask(heads_per_kv, query.dtype)
        grouped = functional.pad(grouped, (0, 0, 0, mask.shape[2] - grouped.shape[2]))
        attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
        attended = attended[:, :, : tokens * heads_per_kv].view(rows, kv_heads, tokens, heads_per_kv, head_dim)
        return attended.permute(0, 2, 1, 3, 4).reshape(rows * tokens, kv_heads * heads_per_kv * head_dim)

    def _mask(self, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, 1, padded num_tokens * heads_per_kv, num_keys], added to the scores: 0 or minus infinity."""
        if heads_per_kv not in self._masks:
            is_hidden = self._is_hidden(heads_per_kv)
            num_query_rows = padded(is_hidden.shape[1], ROW_MULTIPLE)
            mask = torch.zeros(self._num_rows, num_query_rows, self._num_keys, dtype=dtype)
            mask[:, : is_hidden.shape[1]].masked_fill_(is_hidden, float("-inf"))
            self._masks[heads_per_kv] = mask.unsqueeze(1)
        return self._masks[heads_per_kv]

    def _is_hidden(self, heads_per_kv: int) -> Tensor:
        """Which keys each query row does not attend to, [num_rows, num_tokens * heads_per_kv, num_keys]."""
        positions = self._positions.repeat_interleave(heads_per_kv, 1).unsqueeze(2)
        keys = (self._first_keys.unsqueeze(1) + torch.arange(self._num_keys)).unsqueeze(1)  # [num_rows, 1, num_keys]
        is_later = keys > positions
        if self._sliding_window is None:
            return is_later
        return is_later.logical_or_(keys <= positions - self._sliding_window)


def _equal_shapes(rows: Sequence[AttentionRow], sliding_window: int | None, cache: KVCache) -> list[list[_Member]]:
    """The rows grouped by number of tokens and of keys, at most as many together as have their keys in pages of their own."""
    max_keys = cache.num_pages * cache.layout.page_size + len(rows) * _KEY_BLOCK
    groups: dict[tuple[int, int], list[_Member]] = {}
    first_token = 0
    for row in rows:
        member = _Member.of(row, first_token, sliding_window, cache.layout.page_size)
        groups.setdefault((row.num_tokens, member.num_keys), []).append(member)
        first_token += row.num_tokens
    turns: list[list[_Member]] = []
    for (_, num_keys), members in groups.items():
        max_rows = max(1, max_keys // num_keys)
        turns += (members[start : start + max_rows] for start in range(0, len(members), max_rows))
    return turns
