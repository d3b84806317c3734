"""A model's shape as the ``config.json`` of a model folder states it. Refuses what the model code does not compute."""

from __future__ import annotations

import math
from pathlib import Path

from llm_engine.hugging_face_families import FAMILIES, Family
from llm_engine.hugging_face_tokens import FolderTokens
from llm_engine.layer_config import LayerConfig
from llm_engine.model_config import ExpertsConfig, ModelConfig
from llm_engine.rope_scaling import YarnScaling
from serving_core.engine_config import MIN_MODEL_LEN
from serving_core.errors import ModelFileError
from serving_core.model_json import ModelJson

OPTIONAL_KEYS = ("attention_bias", "mlp_bias", "final_logit_softcapping")
"""They change the arithmetic of some families, and in a model of any other family must be off."""

_NOT_COMPUTED = ("quantization_config", "attn_logit_softcapping")
_EXPERT_KEYS = ("num_experts", "num_local_experts")


def read_family(folder: Path) -> Family:
    """The family that ``config.json`` names. Raises ModelFileError for one that is not supported."""
    config = ModelJson.read(folder / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(repr(name) for name in FAMILIES)
        raise ModelFileError(f"{folder} holds a model of type {model_type!r}; supported are {supported}.")
    family = FAMILIES[model_type]
    config.refuse_unless("architectures", [family.architecture], [])
    return family


def read_hugging_face_config(folder: Path, *, tokens: FolderTokens, num_tensors: int) -> ModelConfig:
    """Read ``config.json``. ``num_tensors`` are all that the folder holds. Raises ModelFileError for another architecture, a
    missing value or an unsupported variant."""
    family, config = read_family(folder), ModelJson.read(folder / "config.json")
    _refuse_other_arithmetic(config, family)
    hidden_size = config.count("hidden_size")
    num_heads = config.count("num_attention_heads")
    head_dim = config.count("head_dim", default=family.head_dim or max(1, hidden_size // num_heads))
    num_kv_heads = config.count("num_key_value_heads", default=family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelFileError(
            f"{config.origin} states {num_heads} query heads of {head_dim} on {num_kv_heads} key-value heads; the first must "
            "be a multiple of the last, and a head's size even."
        )
    vocab_size = config.count("vocab_size")
    if tokens.num_plain_tokens > vocab_size:
        raise ModelFileError(f"{folder} has {tokens.num_plain_tokens} tokens but embeddings for {vocab_size}.")
    num_layers = config.count("num_hidden_layers")
    _check_number(folder, num_layers, "layers", num_tensors)
    window = config.count("max_position_embeddings", default=family.max_model_len, smallest=MIN_MODEL_LEN)
    layers = family.read_layers(config, num_layers, theta=family.rope_theta, window=window)
    experts = _read_experts(config, family)
    if experts is not None:
        _check_number(folder, experts.num_experts * sum(layer.has_experts for layer in layers), "experts", num_tensors)
    has_attention_bias = config.flag("attention_bias", default=False)
    return ModelConfig(
        layers=layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        feed_forward_size=config.count("intermediate_size"),
        vocab_size=vocab_size,
        num_tokens=min(tokens.num_tokens, vocab_size),
        max_model_len=_stretched(window, layers),
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6),
        attention_scale=1 / math.sqrt(_query_scalar(config, family, head_dim)),
        is_tied=config.flag("tie_word_embeddings", default=family.is_tied),
        activation=family.activation,
        embedding_scale=math.sqrt(hidden_size) if family.is_embedding_scaled else 1.0,
        logit_soft_cap=config.number("final_logit_softcapping") if "final_logit_softcapping" in config else None,
        experts=experts,
        has_qkv_bias=family.has_qkv_bias or has_attention_bias,
        has_attention_out_bias=has_attention_bias,
        has_feed_forward_bias=config.flag("mlp_bias", default=False),
        has_query_key_norms=family.has_query_key_norms,
        has_out_norms=family.has_out_norms,
    )


def _check_number(folder: Path, number: int, noun: str, num_tensors: int) -> None:
    """Raises for more of something than there are tensors, before anything is made for each of them."""
    if number > num_tensors:
        raise ModelFileError(f"{folder} states {number} {noun} and holds {num_tensors} tensors in all.")


def _refuse_other_arithmetic(config: ModelJson, family: Family) -> None:
    config.refuse_unless(family.activation_key, family.activation_name)
    for key in _NOT_COMPUTED:
        config.refuse_unless(key)
    for key in OPTIONAL_KEYS:
        if key not in family.optional_keys:
            config.refuse_unless(key, False)
    if not family.has_experts:
        for key in _EXPERT_KEYS:
            config.refuse_unless(key)


def _read_experts(config: ModelJson, family: Family) -> ExpertsConfig | None:
    if not family.has_experts:
        return None
    num_experts = config.count("num_experts", default=config.count("num_local_experts", default=128))
    num_chosen = config.count("num_experts_per_tok", default=8)
    if num_chosen > num_experts:
        raise config.wrong("num_experts_per_tok", f"at most {num_experts}, the number of experts")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        feed_forward_size=config.count("moe_intermediate_size", default=768),
        is_normalized=config.flag("norm_topk_prob", default=False),
    )


def _query_scalar(config: ModelJson, family: Family, head_dim: int) -> float:
    if family.query_scalar is None:
        return head_dim
    return config.number("query_pre_attn_scalar", default=family.query_scalar)


def _stretched(window: int, layers: tuple[LayerConfig, ...]) -> int:
    """Some files state the window before YaRN's stretching, others the one after it."""
    scalings = {layer.rope.scaling for layer in layers if layer.rope is not None}
    stretched = (int(item.original_window * item.factor) for item in scalings if isinstance(item, YarnScaling))
    return max([window, *stretched])
