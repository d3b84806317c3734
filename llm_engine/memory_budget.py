"""How many KV pages a memory budget holds. Pure arithmetic."""

from __future__ import annotations

from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVPageLayout


def num_pages_for_budget(layout: KVPageLayout, kv_cache_memory_bytes: int, max_model_len: int) -> int:
    """Pages that fit ``kv_cache_memory_bytes``, at least enough for one sequence of ``max_model_len`` tokens.

    Raises ConfigError, naming the smallest budget that works and the longest window that this one allows.
    """
    num_pages = kv_cache_memory_bytes // layout.page_bytes
    num_needed = layout.num_pages_for(max_model_len)
    if num_pages >= num_needed:
        return num_pages
    way_out = f", or lower --max-model-len to {num_pages * layout.page_size}" if num_pages > 0 else ""
    raise ConfigError(
        f"--kv-cache-memory-bytes is {kv_cache_memory_bytes}, too small for one sequence of {max_model_len} tokens; give at "
        f"least {num_needed * layout.page_bytes}{way_out}."
    )
