"""Writes a tiny random Llama as a Hugging Face folder: config, tokenizer, chat template, safetensors in one file or in shards.

The tokenizer is that of ``tiny_model``, as a ``tokenizer.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_model import CHAT_TEMPLATE, MERGES, SPECIAL_TOKENS, tiny_vocabulary

TINY_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 267,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def write_tiny_folder(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    omit: frozenset[str] = frozenset(),
    extra_tensors: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the folder and return it. ``config`` replaces values of ``TINY_CONFIG``. The weights depend on the sizes alone.

    ``omit`` leaves tensors out by name; ``extra_tensors`` are stored as they are, whatever ``omit`` says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {**TINY_CONFIG, **(config or {})}
    write_json(folder / "config.json", values)
    write_tiny_tokenizer(folder)
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors(values).items() if name not in omit}
    save_tensors(folder, {**tensors, **(extra_tensors or {})}, num_shards=num_shards)
    return folder


def tiny_tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Random float32 weights by name. Equal sizes give equal weights."""
    generator = torch.Generator().manual_seed(0)
    hidden, feed_forward = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key_value = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tensors: dict[str, torch.Tensor] = {}

    def add_linear(name: str, num_out: int, num_in: int, *, scale: float = 1.0, has_bias: bool = False) -> None:
        tensors[f"{name}.weight"] = torch.randn(num_out, num_in, generator=generator) * scale / num_in**0.5
        if has_bias:
            tensors[f"{name}.bias"] = torch.randn(num_out, generator=generator) * 0.5

    def add_norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)

    add_linear("model.embed_tokens", config["vocab_size"], hidden)
    add_norm("model.norm")
    if not config["tie_word_embeddings"]:
        add_linear("lm_head", config["vocab_size"], hidden, scale=3.0)
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        add_norm(f"{prefix}.input_layernorm")
        add_norm(f"{prefix}.post_attention_layernorm")
        add_linear(f"{prefix}.self_attn.q_proj", query, hidden, scale=2.0, has_bias=attention_bias)
        add_linear(f"{prefix}.self_attn.k_proj", key_value, hidden, scale=2.0, has_bias=attention_bias)
        add_linear(f"{prefix}.self_attn.v_proj", key_value, hidden, has_bias=attention_bias)
        add_linear(f"{prefix}.self_attn.o_proj", hidden, query, scale=2.0, has_bias=attention_bias)
        add_linear(f"{prefix}.mlp.gate_proj", feed_forward, hidden, has_bias=mlp_bias)
        add_linear(f"{prefix}.mlp.up_proj", feed_forward, hidden, has_bias=mlp_bias)
        add_linear(f"{prefix}.mlp.down_proj", hidden, feed_forward, scale=2.0, has_bias=mlp_bias)
    return tensors


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], *, num_shards: int = 1) -> None:
    """One ``model.safetensors``, or shards of it with their index."""
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index in range(num_shards):
        shard = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
        own = dict(list(tensors.items())[index::num_shards])
        save_file(own, folder / shard)
        weight_map |= dict.fromkeys(own, shard)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_tiny_tokenizer(folder: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``, with the chat template in the latter."""
    vocabulary = {text: token_id for token_id, text in enumerate(tiny_vocabulary())}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": SPECIAL_TOKENS[1], "eos_token": SPECIAL_TOKENS[2], "chat_template": CHAT_TEMPLATE},
    )


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values), "utf-8")


def change_json(path: Path, **values: Any) -> None:
    """Replace values of a JSON file."""
    write_json(path, {**json.loads(path.read_text("utf-8")), **values})
