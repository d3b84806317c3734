"""Attention over pages by its definition, on any device: what the kernels are checked against, and what takes their place in
checks on machines that cannot run them. No worker computes with it."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_engine.cuda.paged_places import PagedPlaces


class PlainPagedKernel:
    """See ``PagedKernel``. In float32, with one row after another; reads nothing that is no key of the row."""

    name = "plain"
    page_size_multiple = 1
    page_size = 16

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
        page_size = key_pages.shape[1]
        heads_per_kv = query.shape[1] // key_pages.shape[2]
        output = torch.empty_like(query)
        first_tokens, row_keys = places.first_tokens.tolist(), places.num_keys.tolist()
        for row, num_keys in enumerate(row_keys):
            first, end = first_tokens[row], first_tokens[row + 1]
            table = places.page_table[row, : -(-num_keys // page_size)].long()
            key, value = (
                pages[table].flatten(0, 1)[:num_keys].float().repeat_interleave(heads_per_kv, 1)  # [keys, heads, head_dim]
                for pages in (key_pages, value_pages)
            )
            scores = torch.einsum("thd,khd->htk", query[first:end].float(), key) * scale
            keys = torch.arange(num_keys, device=query.device)
            positions = keys[num_keys - (end - first) :].unsqueeze(1)
            is_hidden = keys > positions  # [tokens, keys]
            if sliding_window is not None:
                is_hidden = is_hidden.logical_or(keys <= positions - sliding_window)
            weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
            output[first:end] = torch.einsum("htk,khd->thd", weights, value).to(query.dtype)
        return output
