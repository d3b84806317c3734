"""Which tensors a model has and their shapes, by names of our own. What a checkpoint calls them is its reader's matter."""

from __future__ import annotations

from llm_engine.model_config import ModelConfig

EMBEDDING = "embedding.weight"
FINAL_NORM = "final_norm.weight"
HEAD = "head.weight"
ROPE_FACTORS = "rope_factors"
"""A tensor that some GGUF files hold, see ``DecoderWeights``."""

_NORM = "norm.weight"


def layer_tensor(layer: int, part: str) -> str:
    """The name of a layer's tensor, like ``layer_tensor(3, "up.weight")``."""
    return f"layers.{layer}.{part}"


def expert_part(expert: int, part: str) -> str:
    """The part of a layer that one of its experts has, like ``expert_part(3, "up.weight")``."""
    return f"experts.{expert}.{part}"


def is_norm(name: str) -> bool:
    """Whether the tensor is the weight of a norm."""
    return name.endswith(_NORM)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of these sizes must have."""
    attention, feed_forward, experts = _attention(config), _feed_forward(config), _experts(config)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    for index, layer in enumerate(config.layers):
        parts = attention | (experts if layer.has_experts else feed_forward)
        shapes |= {layer_tensor(index, part): shape for part, shape in parts.items()}
    if not config.is_tied:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parts of every layer: attention, and all norms."""
    hidden = config.hidden_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "query.weight": (query, hidden),
        "key.weight": (key_value, hidden),
        "value.weight": (key_value, hidden),
        "attention_out.weight": (hidden, query),
        "feed_forward_norm.weight": (hidden,),
    }
    if config.has_qkv_bias:
        shapes |= {"query.bias": (query,), "key.bias": (key_value,), "value.bias": (key_value,)}
    if config.has_attention_out_bias:
        shapes["attention_out.bias"] = (hidden,)
    if config.has_query_key_norms:
        shapes |= {"query_norm.weight": (config.head_dim,), "key_norm.weight": (config.head_dim,)}
    if config.has_out_norms:
        shapes |= {"attention_out_norm.weight": (hidden,), "feed_forward_out_norm.weight": (hidden,)}
    return shapes


def _feed_forward(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = _gated(config.hidden_size, config.feed_forward_size)
    if config.has_feed_forward_bias:
        shapes |= {f"{part}.bias": (config.feed_forward_size,) for part in ("gate", "up")}
        shapes["down.bias"] = (config.hidden_size,)
    return shapes


def _experts(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    if config.experts is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {"router.weight": (config.experts.num_experts, config.hidden_size)}
    expert = _gated(config.hidden_size, config.experts.feed_forward_size)
    for index in range(config.experts.num_experts):
        shapes |= {expert_part(index, part): shape for part, shape in expert.items()}
    return shapes


def _gated(hidden: int, feed_forward: int) -> dict[str, tuple[int, ...]]:
    return {"gate.weight": (feed_forward, hidden), "up.weight": (feed_forward, hidden), "down.weight": (hidden, feed_forward)}
