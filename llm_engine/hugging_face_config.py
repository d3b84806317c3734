"""A model's shape as the ``config.json`` of a model folder states it. Refuses what the model code does not compute.

What may be left out, and what it then is, follows transformers' ``LlamaConfig``.
"""

from __future__ import annotations

import math
from pathlib import Path

from llm_engine.model_config import ModelConfig
from llm_engine.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from serving_core.errors import ModelFileError
from serving_core.model_json import ModelJson

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_NOT_COMPUTED = ("sliding_window", "quantization_config", "layer_types", "num_local_experts", "final_logit_softcapping")


def read_hugging_face_config(folder: Path, *, num_tokens: int) -> ModelConfig:
    """Read ``config.json``. ``num_tokens`` is the tokenizer's. Raises ModelFileError for another architecture, a missing value
    or an unsupported variant."""
    config = ModelJson.read(folder / "config.json")
    if config.get("model_type") != "llama":
        raise ModelFileError(f"{folder} holds a model of type {config.get('model_type')!r}; supported is 'llama'.")
    config.refuse_unless("architectures", ["LlamaForCausalLM"], [])
    config.refuse_unless("hidden_act", "silu")
    for key in _NOT_COMPUTED:
        config.refuse_unless(key)

    hidden_size = config.count("hidden_size")
    num_heads = config.count("num_attention_heads")
    head_dim = config.count("head_dim", default=hidden_size // num_heads)
    num_kv_heads = config.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelFileError(
            f"{config.origin} states {num_heads} query heads of {head_dim} on {num_kv_heads} key-value heads; the first must "
            "be a multiple of the last, and a head's size even."
        )
    vocab_size = config.count("vocab_size")
    if num_tokens > vocab_size:
        raise ModelFileError(f"{folder} has {num_tokens} tokens but embeddings for {vocab_size}.")
    window = config.count("max_position_embeddings", default=2048)
    rope = _rope_section(config)
    scaling = _rope_scaling(rope, window)
    if isinstance(scaling, YarnScaling):
        # Some files state the window before the stretching, others the one after it.
        window = max(window, int(scaling.original_window * scaling.factor))
    return ModelConfig(
        num_layers=config.count("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        feed_forward_size=config.count("intermediate_size"),
        vocab_size=vocab_size,
        num_tokens=num_tokens,
        max_model_len=window,
        rope_theta=rope.number("rope_theta", default=config.number("rope_theta", default=10_000.0)),
        rope_scaling=scaling,
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6),
        is_tied=config.flag("tie_word_embeddings", default=False),
        has_attention_bias=config.flag("attention_bias", default=False),
        has_feed_forward_bias=config.flag("mlp_bias", default=False),
    )


def _rope_section(config: ModelJson) -> ModelJson:
    """``rope_parameters``, or ``rope_scaling`` as it was called before, or an empty section."""
    return config.section("rope_parameters") or config.section("rope_scaling") or ModelJson(config.origin, {})


def _rope_scaling(rope: ModelJson, window: int) -> RopeScaling | None:
    kind_key = "rope_type" if "rope_type" in rope else "type"
    rope.refuse_unless(kind_key, *_ROPE_TYPES)
    rope.refuse_unless("partial_rotary_factor", 1, 1.0)
    kind = rope.text(kind_key) or "default"
    if kind == "default":
        return None
    factor = rope.number("factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    original_window = rope.count("original_max_position_embeddings", default=window)
    if kind == "yarn":
        return YarnScaling(
            factor=factor,
            original_window=original_window,
            attention_factor=rope.number("attention_factor", default=_yarn_attention_factor(rope, factor)),
            beta_fast=rope.number("beta_fast", default=32.0),
            beta_slow=rope.number("beta_slow", default=1.0),
            is_rounded=rope.flag("truncate", default=True),
        )
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.wrong("high_freq_factor", f"above low_freq_factor, {low:g}")
    return Llama3Scaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_window=original_window)


def _yarn_attention_factor(rope: ModelJson, factor: float) -> float:
    """The paper's 0.1 ln(factor) + 1, or the ratio of two of them with weights of their own."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)
