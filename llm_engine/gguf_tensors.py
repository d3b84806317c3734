"""Where a GGUF file keeps each tensor of the model: under which name, and for an expert's, at which place in a stack."""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.decoder_tensors import EMBEDDING, FINAL_NORM, HEAD, ROPE_FACTORS

_NAMES = {
    EMBEDDING: "token_embd.weight",
    FINAL_NORM: "output_norm.weight",
    HEAD: "output.weight",
    ROPE_FACTORS: "rope_freqs.weight",
}
_PARTS = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "attention_out": "attn_output",
    "attention_out_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_out_norm": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "router": "ffn_gate_inp",
}

_STACK = "_exps."


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlace:
    """A stored tensor, or with ``expert`` that expert's part of one that holds all experts of a layer."""

    name: str
    expert: int | None = None


def gguf_place(name: str) -> GgufPlace:
    """The place of one of the names of ``decoder_tensors``."""
    if name in _NAMES:
        return GgufPlace(name=_NAMES[name])
    match name.split("."):
        case ["layers", layer, "experts", expert, part, kind]:
            return GgufPlace(name=f"blk.{layer}.{_PARTS[part]}{_STACK}{kind}", expert=int(expert))
        case ["layers", layer, part, kind]:
            return GgufPlace(name=f"blk.{layer}.{_PARTS[part]}.{kind}")
    raise AssertionError(f"{name} is no tensor of a decoder")


def is_stack(stored_name: str) -> bool:
    """Whether the stored tensor holds all experts of a layer."""
    return _STACK in stored_name
