"""Attention by flash-attn-4, which is written in the CuTe DSL and compiles itself on first use. Function and limits as in
flash-attn-4 4.0.0b36, whose ``flash_attn/cute/interface.py`` states them. Paged keys need compute capability 9.x, 10.x or 11.x.
Pages as large as a tile of keys, 128 tokens for heads of up to 128 dimensions, are loaded by the tensor memory accelerator.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import cast

from flash_attn.cute import flash_attn_varlen_func
from torch import Tensor

from llm_engine.cuda.paged_places import PagedPlaces


class FlashAttn4:
    """See ``PagedKernel``."""

    page_size_multiple = 1
    page_size = 128

    def __init__(self) -> None:
        self.name = f"flash-attn-4 {version('flash-attn-4')}"

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
        window = (None, None) if sliding_window is None else (sliding_window - 1, 0)
        is_decode = places.has_one_token_rows
        attended, _ = flash_attn_varlen_func(
            query.unsqueeze(1) if is_decode else query,
            key_pages,
            value_pages,
            cu_seqlens_q=None if is_decode else places.first_tokens,
            max_seqlen_q=1 if is_decode else places.max_row_tokens,
            max_seqlen_k=places.max_row_keys,
            seqused_k=places.num_keys,
            page_table=places.page_table,
            softmax_scale=scale,
            causal=True,
            window_size=window,
            num_splits=1,
        )
        return cast(Tensor, attended).view_as(query)
