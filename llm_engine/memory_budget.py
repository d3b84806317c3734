"""What a worker needs of memory beside its weights: KV pages, and the workspace of a step. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.model_config import ModelConfig
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType, KVPageLayout

MAX_PREFILL_STEPS = 1024
"""A prompt as long as the window is computed in at most this many steps."""

HARMLESS_STEP_TOKENS = 512
"""A step budget up to this, the default, needs no lowering for a small KV cache: it takes next to no memory."""

_ITEM_BYTES = {KVDType.FLOAT32: 4, KVDType.BFLOAT16: 2, KVDType.FLOAT16: 2}
_FLOAT32_BYTES = 4
_KEY_BLOCK = 512
"""The attention back end rounds the keys of a sequence up to a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The largest step of a worker: ``num_tokens`` computed at once for ``num_rows`` sequences, at most ``max_row_tokens`` for
    one of them; ``num_keys`` keys attended to by all of them together, at most ``max_row_keys`` by one."""

    num_tokens: int
    max_row_tokens: int
    num_rows: int
    num_keys: int
    max_row_keys: int

    @classmethod
    def of_prefill(
        cls, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, page_size: int, num_pages: int
    ) -> StepSize:
        """A step full of prompts: one at the end of the window, and as many others as may begin, down to a token each."""
        num_tokens = min(max_num_batched_tokens, num_pages * page_size)
        num_rows = min(max_num_seqs, num_tokens, num_pages)
        max_row_keys = _padded(max_model_len)
        num_keys = min(num_rows * max_row_keys, max_row_keys + _padded(num_tokens) + (num_rows - 1) * _KEY_BLOCK)
        return cls(
            num_tokens=num_tokens,
            max_row_tokens=num_tokens,
            num_rows=num_rows,
            num_keys=num_keys,
            max_row_keys=max_row_keys,
        )

    @classmethod
    def of_decode(
        cls, *, max_num_seqs: int, max_replay_tokens: int, max_model_len: int, page_size: int, num_pages: int
    ) -> StepSize:
        """A token for each of ``max_num_seqs`` sequences, which share the pages that there are; for one of them the
        ``max_replay_tokens`` of a replayed log instead."""
        num_rows = min(max_num_seqs, num_pages)
        max_row_keys = _padded(max_model_len)
        num_keys = min(num_rows * max_row_keys, num_pages * page_size + num_rows * _KEY_BLOCK)
        return cls(
            num_tokens=num_rows - 1 + max_replay_tokens,
            max_row_tokens=max_replay_tokens,
            num_rows=num_rows,
            num_keys=num_keys,
            max_row_keys=max_row_keys,
        )


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


def check_step_budget(max_num_batched_tokens: int, *, max_model_len: int, num_cache_tokens: int) -> None:
    """Raises ConfigError for a prefill step so small that a long prompt takes for ever, or so large that the KV cache, which
    holds ``num_cache_tokens``, could never fill it. The error names the number that would work."""
    smallest = -(-max_model_len // MAX_PREFILL_STEPS)
    if max_num_batched_tokens < smallest:
        raise ConfigError(
            f"--max-num-batched-tokens is {max_num_batched_tokens}, with which a prompt of --max-model-len, {max_model_len}, "
            f"would take {-(-max_model_len // max_num_batched_tokens)} steps; give at least {smallest}."
        )
    if max_num_batched_tokens > max(num_cache_tokens, HARMLESS_STEP_TOKENS):
        raise ConfigError(
            f"--max-num-batched-tokens is {max_num_batched_tokens}, but a cache of --kv-cache-memory-bytes holds "
            f"{num_cache_tokens} tokens in all; give at most {num_cache_tokens}, or a larger cache."
        )


def workspace_bytes(config: ModelConfig, dtype: KVDType, step: StepSize) -> int:
    """What a step of that size takes beside weights and KV pages: activations, gathered keys and values, masks, logits.

    An estimate from above: 1.1 to 2.0 times what was measured with the default model in float32 and bfloat16.
    """
    item_bytes = _ITEM_BYTES[dtype]
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Query, key and value with their rotation in float32; then gate, up, their product and its factors. What the first took
    # may not have been given back when the second begins.
    attention = item_bytes * (query + 2 * key_value + query) + 3 * _FLOAT32_BYTES * (query + key_value)
    feed_forward_size = _largest_feed_forward_size(config)
    feed_forward = item_bytes * 4 * feed_forward_size
    residual = (2 * item_bytes + 2 * _FLOAT32_BYTES) * config.hidden_size
    activations = step.num_tokens * (residual + attention + feed_forward)
    packed = 2 * feed_forward_size * config.hidden_size * item_bytes  # a kernel's own copy of the largest layer matrix
    gathered = step.num_keys * 2 * key_value * item_bytes
    heads_per_kv_head = config.num_heads // config.num_kv_heads
    num_masked = min(step.num_tokens * step.max_row_keys, step.max_row_tokens * step.num_keys)
    # Beside the mask itself, two bytes that say which keys are later or before the window. Each window has masks of its own.
    num_windows = len({layer.sliding_window for layer in config.layers})
    masks = num_masked * heads_per_kv_head * (num_windows * item_bytes + 2)
    logits = step.num_rows * config.num_tokens * (_FLOAT32_BYTES + item_bytes)
    return activations + packed + gathered + masks + logits


def _largest_feed_forward_size(config: ModelConfig) -> int:
    """Of one network: a step may send all of its tokens to the same expert, and experts take turns."""
    sizes = {config.feed_forward_size for layer in config.layers if not layer.has_experts}
    return max(sizes | ({config.experts.feed_forward_size} if config.experts is not None else set()))


def _padded(num_keys: int) -> int:
    return -(-num_keys // _KEY_BLOCK) * _KEY_BLOCK
