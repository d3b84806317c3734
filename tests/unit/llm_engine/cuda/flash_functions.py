"""Stand-ins for the functions of flash-attn and flash-attn-4, which run on CUDA devices only: what their documentation
promises, in plain torch, and a refusal of arguments that it rules out. Parameters are named as in flash-attn 2.8.3 and
flash-attn-4 4.0.0b36, as far as they are used.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_with_kvcache(
    q: Tensor,  # [batch, seqlen, heads, head_dim]
    k_cache: Tensor,  # [num_blocks, page_block_size, kv_heads, head_dim]
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,  # [batch], int32
    block_table: Tensor,  # [batch, max_blocks], int32
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_splits: int = 0,
) -> Tensor:
    assert num_splits == 1, "else the number of splits follows the batch"
    assert k_cache.shape[1] % 256 == 0
    lengths = [q.shape[1]] * len(q)
    attended = _attend(
        q.flatten(0, 1),
        (k_cache, v_cache),
        lengths=lengths,
        num_keys=cache_seqlens,
        table=block_table,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
    )
    return attended.view_as(q)


def flash_attn_varlen_func(
    q: Tensor,  # [total_q, heads, head_dim]
    k: Tensor,  # [num_blocks, page_block_size, kv_heads, head_dim]
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    block_table: Tensor,
) -> Tensor:
    assert k.shape[1] % 256 == 0
    assert max_seqlen_q > 1, "else the number of splits follows the batch"
    lengths, num_keys = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0
    assert cu_seqlens_k.dtype is torch.int32
    assert int(lengths.max()) <= max_seqlen_q
    assert int(num_keys.max()) <= max_seqlen_k
    return _attend(
        q,
        (k, v),
        lengths=_lengths(cu_seqlens_q),
        num_keys=num_keys,
        table=block_table,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
    )


def cute_flash_attn_varlen_func(
    q: Tensor,  # [total_q, heads, head_dim] with cu_seqlens_q, else [batch, seqlen_q, heads, head_dim]
    k: Tensor,  # [num_pages, page_size, kv_heads, head_dim]
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    num_splits: int = 1,
) -> tuple[Tensor, None]:
    assert num_splits == 1
    assert page_table.is_contiguous()
    lengths = [q.shape[1]] * len(q) if cu_seqlens_q is None else _lengths(cu_seqlens_q)
    assert max_seqlen_q is not None
    assert max(lengths) <= max_seqlen_q
    assert max_seqlen_k is None or int(seqused_k.max()) <= max_seqlen_k
    tokens = q.flatten(0, 1) if cu_seqlens_q is None else q
    left, right = (-1 if size is None else size for size in window_size)
    attended = _attend(
        tokens,
        (k, v),
        lengths=lengths,
        num_keys=seqused_k,
        table=page_table,
        scale=softmax_scale,
        causal=causal,
        window=(left, right),
    )
    return attended.view_as(q), None


def _lengths(sums: Tensor) -> list[int]:
    assert sums.dtype is torch.int32
    return [int(length) for length in sums.diff()]


def _attend(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    *,
    lengths: list[int],
    num_keys: Tensor,
    table: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
) -> Tensor:
    """Query i of n, of a sequence of m keys, stands at key i + m - n: ``causal`` hides those after it, ``window`` those
    more than (left, right) away from it, -1 for none."""
    assert table.dtype is num_keys.dtype is torch.int32
    assert len(table) == len(num_keys) == len(lengths)
    assert all(side.stride(-1) == 1 for side in (q, *pages))
    assert scale is not None
    output, first = torch.empty_like(q), 0
    for blocks, keys, length in zip(table, num_keys.tolist(), lengths, strict=True):
        key, value = (side[blocks.long()].flatten(0, 1)[:keys].double() for side in pages)
        for query in range(length):
            place = query + keys - length
            begin = 0 if window[0] < 0 else max(0, place - window[0])
            end = min(keys, place + 1 if causal else keys if window[1] < 0 else place + window[1] + 1)
            for head in range(q.shape[1]):
                kv_head = head * key.shape[1] // q.shape[1]
                weights = torch.softmax(key[begin:end, kv_head] @ q[first + query, head].double() * scale, 0)
                output[first + query, head] = weights @ value[begin:end, kv_head]
        first += length
    assert first == len(q)
    return output
