"""Attention by flash-attn 2. Source: Dao 2023 (arXiv:2307.08691); functions and limits as in flash-attn 2.8.3, whose
``flash_attn_interface.py`` states them. Needs compute capability 8.0.

``num_splits=1`` keeps the keys of a row in one sum. By default their division follows a heuristic that counts the rows of the
step, and ``flash_attn_varlen_func`` leaves no choice when all rows are single tokens (``mha_varlen_fwd`` in ``flash_api.cpp``),
so that those go through ``flash_attn_with_kvcache``.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import cast

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from llm_engine.cuda.paged_places import PagedPlaces


class FlashAttn2:
    """See ``PagedKernel``."""

    page_size_multiple = 256
    page_size = 256

    def __init__(self) -> None:
        self.name = f"flash-attn {version('flash-attn')}"

    def __call__(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        places: PagedPlaces,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        if places.has_one_token_rows:
            attended = flash_attn_with_kvcache(
                query.unsqueeze(1),
                key_pages,
                value_pages,
                cache_seqlens=places.num_keys,
                block_table=places.page_table,
                softmax_scale=scale,
                causal=True,
                window_size=window,
                num_splits=1,
            )
            return cast(Tensor, attended).squeeze(1)
        attended = flash_attn_varlen_func(
            query,
            key_pages,
            value_pages,
            cu_seqlens_q=places.first_tokens,
            cu_seqlens_k=places.first_keys,
            max_seqlen_q=places.max_row_tokens,
            max_seqlen_k=places.max_row_keys,
            softmax_scale=scale,
            causal=True,
            window_size=window,
            block_table=places.page_table,
        )
        return cast(Tensor, attended)
