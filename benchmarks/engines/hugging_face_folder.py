"""Writes a GGUF model of the Llama family as a Hugging Face folder in bfloat16, for the peers that read nothing else.

Weights come through the ``gguf`` library's own reader, so that a mistake in ours would show as other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

from llm_engine.checkpoint import Checkpoint
from llm_engine.model_config import Activation, ModelConfig
from llm_engine.open_checkpoint import open_checkpoint

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTATED = ("attn_q", "attn_k")


class UnsupportedModel(Exception):
    """A model that cannot be written as one of the Llama family."""


def write_hugging_face_folder(gguf_path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer into ``folder``, which must be there. Raises UnsupportedModel."""
    with closing(open_checkpoint(gguf_path)) as checkpoint:
        (folder / "config.json").write_text(json.dumps(_llama_config(checkpoint), indent=2))
        head_dim = checkpoint.config.head_dim
    tensors = {
        hugging_face_name(tensor.name): _weight(tensor, head_dim)
        for tensor in GGUFReader(gguf_path).tensors
        if tensor.name in _NAMES or tensor.name.startswith("blk.")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    tokenizer.save_pretrained(folder)


def hugging_face_name(name: str) -> str:
    """What transformers' Llama calls the tensor that llama.cpp calls ``name``."""
    if name in _NAMES:
        return _NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}"


def _weight(tensor: Any, head_dim: int) -> torch.Tensor:
    """Rows of queries and keys go from llama.cpp's order, a head's two halves interleaved, into that of transformers."""
    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if any(part in tensor.name for part in _ROTATED):
        values = values.reshape(-1, head_dim // 2, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
    return torch.tensor(values, dtype=torch.bfloat16)


def _llama_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    config = checkpoint.config
    (layer, *others) = set(config.layers)
    if others or layer.rope is None or layer.rope.scaling is not None or not _is_llama(config):
        raise UnsupportedModel(f"{checkpoint.path} is not a plain model of the Llama family; transformers and vLLM need one.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.feed_forward_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": layer.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.is_tied,
        "bos_token_id": None,
        "eos_token_id": sorted(checkpoint.eos_token_ids),
    }


def _is_llama(config: ModelConfig) -> bool:
    has_extras = config.has_qkv_bias or config.has_attention_out_bias or config.has_feed_forward_bias
    has_norms = config.has_query_key_norms or config.has_out_norms
    return not (has_extras or has_norms or config.experts is not None) and config.activation is Activation.SILU
