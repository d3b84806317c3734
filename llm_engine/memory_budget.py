"""What a worker needs of memory beside its weights: KV pages, and the workspace of a step. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.model_config import ModelConfig
from llm_engine.padding import padded
from serving_core.engine_config import MAX_KV_CACHE_BYTES, MAX_MODEL_LEN, MIN_MODEL_LEN
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.worker_status import PhaseName

MAX_PREFILL_STEPS = 1024
"""A prompt as long as the window is computed in at most this many steps."""

HARMLESS_STEP_TOKENS = 512
"""A step budget up to this, the default, needs no lowering for a small KV cache: it takes next to no memory."""

_FLOAT32_BYTES = 4
_KEY_BLOCK = 512
"""Torch's attention back end rounds the keys of a sequence up to a multiple of this."""

_CHUNK_KEYS, _DIM_MULTIPLE, _PART_FLOATS = 256, 32, 16
"""The native kernels: keys of a partial result, what the size of a head is padded to, floats of a partial result beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The largest step of a worker: ``num_tokens`` computed at once for ``num_rows`` sequences, at most ``max_row_tokens`` for
    one of them; ``num_keys`` keys attended to by all of them together, at most ``max_row_keys`` by one."""

    num_tokens: int
    max_row_tokens: int
    num_rows: int
    num_keys: int
    max_row_keys: int

    @property
    def num_pairs(self) -> int:
        """Of a token with a key of its sequence, at most."""
        return min(self.num_tokens * self.max_row_keys, self.max_row_tokens * self.num_keys)

    @classmethod
    def of_prefill(
        cls, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, page_size: int, num_pages: int
    ) -> StepSize:
        """A step full of prompts, down to a token each, which all together have no more in the cache before it than one at the
        end of the window (see ``PrefillScheduler``)."""
        num_tokens = min(max_num_batched_tokens, num_pages * page_size)
        num_rows = min(max_num_seqs, num_tokens, num_pages)
        max_row_keys = padded(max_model_len, _KEY_BLOCK)
        num_keys = min(num_rows * max_row_keys, max_row_keys + padded(num_tokens, _KEY_BLOCK) + (num_rows - 1) * _KEY_BLOCK)
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
        """A token for each of ``max_num_seqs`` sequences; for one of them the ``max_replay_tokens`` of a replayed log instead.
        No more keys are gathered at once than there are pages for, though sequences that share pages may have more."""
        num_rows = min(max_num_seqs, num_pages)
        max_row_keys = padded(max_model_len, _KEY_BLOCK)
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

    Raises ConfigError, naming the smallest budget that works and the longest window that this one allows, as far as they can be
    asked for.
    """
    num_pages = kv_cache_memory_bytes // layout.page_bytes
    num_needed = layout.num_pages_for(max_model_len)
    if num_pages >= num_needed:
        return num_pages
    needed_bytes, window = num_needed * layout.page_bytes, longest_window(layout, kv_cache_memory_bytes)
    larger = [f"give at least {needed_bytes}"] if needed_bytes <= MAX_KV_CACHE_BYTES else []
    shorter = [f"lower --max-model-len to {window}"] if window >= MIN_MODEL_LEN else []
    raise ConfigError(
        f"--kv-cache-memory-bytes is {kv_cache_memory_bytes}, too small for one sequence of {max_model_len} tokens; "
        f"{', or '.join(larger + shorter) or 'give more, and lower --max-model-len'}."
    )


def longest_window(layout: KVPageLayout, kv_cache_memory_bytes: int) -> int:
    """The longest ``--max-model-len`` of which one sequence fits; below ``MIN_MODEL_LEN`` where none does."""
    return min(kv_cache_memory_bytes // layout.page_bytes * layout.page_size, MAX_MODEL_LEN)


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


def workspace_bytes(
    config: ModelConfig, phase: PhaseName, dtype: KVDType, step: StepSize, *, cache_dtype: KVDType, is_native: bool
) -> int:
    """What a step of ``phase`` of that size takes beside weights and KV pages: activations, what attention needs, logits.
    ``dtype`` is that of the activations; ``is_native``: the native kernels compute the phase.

    For torch an estimate from above: 1.1 to 2.0 times what was measured with the default model in float32 and bfloat16. For the
    native kernels what their tensors come to: 32 rows of decode took 2 % more.
    """
    item_bytes = dtype.num_bytes
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Query, key and value with their rotation in float32; then gate, up, their product and its factors. What the first took
    # may not have been given back when the second begins.
    attention = item_bytes * (query + 2 * key_value + query) + 3 * _FLOAT32_BYTES * (query + key_value)
    feed_forward_size = _largest_feed_forward_size(config)
    feed_forward = item_bytes * 4 * feed_forward_size
    residual = (2 * item_bytes + 2 * _FLOAT32_BYTES) * config.hidden_size
    activations = step.num_tokens * (residual + attention + feed_forward)
    logits = step.num_rows * config.num_tokens * (_FLOAT32_BYTES + item_bytes)
    if is_native:
        return activations + _native_attention_bytes(config, phase, step) + logits
    packed = 2 * feed_forward_size * config.hidden_size * item_bytes  # a kernel's own copy of the largest layer matrix
    return activations + packed + _torch_attention_bytes(config, dtype, step, cache_dtype) + logits


def _native_attention_bytes(config: ModelConfig, phase: PhaseName, step: StepSize) -> int:
    """In prefill the packed keys and values of all rows, bfloat16; in decode each token's partial results, float32."""
    head_dim = padded(config.head_dim, _DIM_MULTIPLE)
    if phase is PhaseName.PREFILL:
        return step.num_keys * config.num_kv_heads * 2 * head_dim * KVDType.BFLOAT16.num_bytes
    return step.num_pairs // _CHUNK_KEYS * config.num_heads * (_PART_FLOATS + head_dim) * _FLOAT32_BYTES


def _torch_attention_bytes(config: ModelConfig, dtype: KVDType, step: StepSize, cache_dtype: KVDType) -> int:
    """Gathered keys and values, and masks."""
    key_value = config.num_kv_heads * config.head_dim
    gathered = step.num_keys * 2 * key_value * dtype.num_bytes
    if cache_dtype is not dtype:  # as they are held, then in float32: keys first, then values
        gathered += step.num_keys * key_value * (cache_dtype.num_bytes + _FLOAT32_BYTES)
    # Beside the mask itself, two bytes that say which keys are later or before the window. Each window has masks of its own.
    num_windows = len({layer.sliding_window for layer in config.layers})
    heads_per_kv_head = config.num_heads // config.num_kv_heads
    return gathered + step.num_pairs * heads_per_kv_head * (num_windows * dtype.num_bytes + 2)


def _largest_feed_forward_size(config: ModelConfig) -> int:
    """Of one network: a step may send all of its tokens to the same expert, and experts take turns."""
    sizes = {config.feed_forward_size for layer in config.layers if not layer.has_experts}
    return max(sizes | ({config.experts.feed_forward_size} if config.experts is not None else set()))
