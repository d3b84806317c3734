"""A tiny random model of each family, made and written by transformers, and the same weights as llama.cpp would store them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_model import tiny_vocabulary
from tests.tiny_model_folder import write_tiny_tokenizer

SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 267,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
SWA = {"use_sliding_window": True, "sliding_window": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyFamily:
    """``config`` goes to transformers beside ``SIZES``. ``gguf`` are the metadata that llama.cpp's converter writes beside
    those of every architecture, None where it has no such architecture or does not carry this variant."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    architecture: str = "llama"
    gguf: dict[str, Any] | None = field(default_factory=dict)

    def with_config(self, **config: Any) -> TinyFamily:
        """The same for a variant that GGUF cannot state."""
        return dataclasses.replace(self, config={**self.config, **config}, gguf=None)


LLAMA = TinyFamily(model_type="llama")
MISTRAL = TinyFamily(model_type="mistral", config={"sliding_window": 16}, gguf=None)
SMOLLM3 = TinyFamily(model_type="smollm3", architecture="smollm3")
QWEN2 = TinyFamily(model_type="qwen2", architecture="qwen2")
QWEN3 = TinyFamily(model_type="qwen3", architecture="qwen3", config={"head_dim": 32})
QWEN3_MOE = TinyFamily(
    model_type="qwen3_moe",
    architecture="qwen3moe",
    config={"head_dim": 16, **EXPERTS},
    gguf={"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32},
)
GEMMA3 = TinyFamily(
    model_type="gemma3_text",
    architecture="gemma3",
    config={"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
    gguf={"attention.sliding_window": 16},
)

FAMILIES: Mapping[str, TinyFamily] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral without window": dataclasses.replace(LLAMA, model_type="mistral", config={"sliding_window": None}),
    "smollm3": SMOLLM3,
    "smollm3 untied": SMOLLM3.with_config(tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "smollm3 layers": SMOLLM3.with_config(no_rope_layers=[0, 1, 1, 0], **SWA),
    "qwen2": QWEN2,
    "qwen2 window": QWEN2.with_config(**SWA, max_window_layers=2),
    "qwen3": QWEN3,
    "qwen3 window": QWEN3.with_config(attention_bias=True, **SWA, max_window_layers=1),
    "qwen3 moe": QWEN3_MOE,
    "qwen3 moe mixed": QWEN3_MOE.with_config(mlp_only_layers=[2], norm_topk_prob=False, **SWA),
    "gemma3": GEMMA3,
    "gemma3 scaled": GEMMA3.with_config(
        query_pre_attn_scalar=24,
        final_logit_softcapping=3.0,
        sliding_window_pattern=3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_theta=50_000.0,
        rope_local_base_freq=500.0,
        attention_bias=True,
    ),
}


def make_tiny_model(family: TinyFamily) -> Any:
    """transformers' model with random float32 weights, loud enough for its answers to vary. Equal families, equal weights."""
    config = AutoConfig.for_model(family.model_type, **{**SIZES, **family.config})
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    has_out_norms = family.model_type == "gemma3_text"
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and has_out_norms:
                # Loud layers drown the embedding in the residual stream; else a tied head would only repeat the last token.
                tensor.copy_(0.1 * noise + (3 if ".post_" in name else 0))
            elif "norm" in name:
                tensor.copy_(0.1 * noise + 1)
            elif name.endswith("bias"):
                tensor.copy_(0.5 * noise)
            elif "embed_tokens" in name:
                tensor.copy_(noise / 8)
            else:
                tensor.copy_(2 * noise / tensor.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = None  # generates on, as ours does when driven by hand
    return model.eval()


def write_tiny_family_folder(folder: Path, model: Any) -> Path:
    """As ``save_pretrained`` writes it, and a tokenizer of 267 tokens."""
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_family_gguf(path: Path, family: TinyFamily, model: Any) -> Path:
    """The model's weights in float32 under the names, and in the order, that llama.cpp's converter gives them."""
    assert family.gguf is not None
    config = model.config
    arch = next(number for number, name in MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    writer = GGUFWriter(path, family.architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **family.gguf,
    }
    for key, value in metadata.items():
        writer.add_uint32(f"{family.architecture}.{key}", value)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_float32(f"{family.architecture}.rope.freq_base", rope["rope_theta"])
    writer.add_float32(f"{family.architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_token_list(tiny_vocabulary())
    writer.add_eos_token_id(2)
    for name, tensor in _stored_tensors(model, family, head_dim).items():
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        writer.add_tensor(stored_name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored_tensors(model: Any, family: TinyFamily, head_dim: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if "norm" in name and family.architecture == "gemma3":
            tensor = 1 + tensor
        if family.architecture in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            halves = tensor.unflatten(0, (-1, 2, head_dim // 2))
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            tensors[f"{stem}gate_proj.weight"], tensors[f"{stem}up_proj.weight"] = tensor.chunk(2, dim=1)
        else:
            tensors[name.replace("experts.down_proj", "experts.down_proj.weight")] = tensor
    return tensors
