"""Which tensors a Llama has and their shapes, by the names that transformers gives them. No tensor is made here."""

from __future__ import annotations

from llm_engine.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ROPE_FACTORS = "rope_factors"
"""Not of transformers: a tensor that some GGUF files hold, see ``LlamaWeights``."""


def layer_tensor(layer: int, part: str) -> str:
    """The name of a layer's tensor, like ``layer_tensor(3, "mlp.up_proj.weight")``."""
    return f"model.layers.{layer}.{part}"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of these sizes must have."""
    hidden, feed_forward = config.hidden_size, config.feed_forward_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (feed_forward, hidden),
        "mlp.up_proj.weight": (feed_forward, hidden),
        "mlp.down_proj.weight": (hidden, feed_forward),
    }
    if config.has_attention_bias:
        layer_shapes |= {
            "self_attn.q_proj.bias": (query,),
            "self_attn.k_proj.bias": (key_value,),
            "self_attn.v_proj.bias": (key_value,),
            "self_attn.o_proj.bias": (hidden,),
        }
    if config.has_feed_forward_bias:
        layer_shapes |= {
            "mlp.gate_proj.bias": (feed_forward,),
            "mlp.up_proj.bias": (feed_forward,),
            "mlp.down_proj.bias": (hidden,),
        }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    for layer in range(config.num_layers):
        shapes |= {layer_tensor(layer, part): shape for part, shape in layer_shapes.items()}
    if not config.is_tied:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes
