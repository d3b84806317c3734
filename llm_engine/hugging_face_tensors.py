"""What a Hugging Face folder calls each tensor of the model."""

from __future__ import annotations

from llm_engine.decoder_tensors import EMBEDDING, FINAL_NORM, HEAD

_NAMES = {EMBEDDING: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", HEAD: "lm_head.weight"}
_PARTS = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention_out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
}
_PARTS_BESIDE_OUT_NORMS = _PARTS | {
    "attention_out_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_out_norm": "post_feedforward_layernorm",
}
_EXPERT_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def hugging_face_name(name: str, *, has_out_norms: bool) -> str:
    """The stored name for one of the names of ``decoder_tensors``. ``has_out_norms``: see ``ModelConfig``; in these models
    ``post_attention_layernorm`` is another norm than in all others."""
    if name in _NAMES:
        return _NAMES[name]
    parts = _PARTS_BESIDE_OUT_NORMS if has_out_norms else _PARTS
    match name.split("."):
        case ["layers", layer, "experts", expert, part, kind]:
            return f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERT_PARTS[part]}.{kind}"
        case ["layers", layer, part, kind]:
            return f"model.layers.{layer}.{parts[part]}.{kind}"
    raise AssertionError(f"{name} is no tensor of a decoder")
