"""What each family takes for granted, so that its ``config.json`` may leave it out. Follows transformers' configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from llm_engine.hugging_face_layers import (
    read_gemma3_layers,
    read_llama_layers,
    read_mistral_layers,
    read_qwen_layers,
    read_qwen_moe_layers,
    read_smollm3_layers,
)
from llm_engine.layer_config import LayerConfig
from llm_engine.model_config import Activation
from serving_core.model_json import ModelJson


class _LayerReader(Protocol):
    """Reads what differs between layers. ``theta`` is the family's base of the rotary embedding, ``window`` the longest
    sequence that ``config`` states."""

    def __call__(self, config: ModelJson, num_layers: int, *, theta: float, window: int) -> tuple[LayerConfig, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One value of ``model_type``. ``optional_keys`` are those of ``hugging_face_config.OPTIONAL_KEYS`` that it obeys. None for
    ``head_dim`` is hidden_size / num_heads, for ``num_kv_heads`` as many as heads, for ``query_scalar`` the ``head_dim``.
    ``norm_offset`` is added to the stored weights of norms.
    """

    architecture: str
    read_layers: _LayerReader
    max_model_len: int
    rope_theta: float = 10_000.0
    num_kv_heads: int | None = None
    head_dim: int | None = None
    is_tied: bool = False
    optional_keys: frozenset[str] = frozenset()
    activation_key: str = "hidden_act"
    activation_name: str = "silu"
    activation: Activation = Activation.SILU
    has_qkv_bias: bool = False
    has_query_key_norms: bool = False
    has_out_norms: bool = False
    has_experts: bool = False
    is_embedding_scaled: bool = False
    query_scalar: int | None = None
    norm_offset: float = 0.0


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        read_layers=read_llama_layers,
        max_model_len=2048,
        optional_keys=frozenset({"attention_bias", "mlp_bias"}),
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        read_layers=read_mistral_layers,
        max_model_len=131_072,
        num_kv_heads=8,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        read_layers=read_smollm3_layers,
        max_model_len=32_768,
        rope_theta=2_000_000.0,
        num_kv_heads=4,
        is_tied=True,
        optional_keys=frozenset({"attention_bias", "mlp_bias"}),
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        read_layers=read_qwen_layers,
        max_model_len=32_768,
        num_kv_heads=32,
        has_qkv_bias=True,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        read_layers=read_qwen_layers,
        max_model_len=32_768,
        num_kv_heads=32,
        head_dim=128,
        optional_keys=frozenset({"attention_bias"}),
        has_query_key_norms=True,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        read_layers=read_qwen_moe_layers,
        max_model_len=32_768,
        num_kv_heads=4,
        optional_keys=frozenset({"attention_bias"}),
        has_query_key_norms=True,
        has_experts=True,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        read_layers=read_gemma3_layers,
        max_model_len=131_072,
        rope_theta=1_000_000.0,
        num_kv_heads=4,
        head_dim=256,
        is_tied=True,
        optional_keys=frozenset({"attention_bias", "final_logit_softcapping"}),
        activation_key="hidden_activation",
        activation_name="gelu_pytorch_tanh",
        activation=Activation.GELU_TANH,
        has_query_key_norms=True,
        has_out_norms=True,
        is_embedding_scaled=True,
        query_scalar=256,
        norm_offset=1.0,
    ),
}
