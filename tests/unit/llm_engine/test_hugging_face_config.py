from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llm_engine.hugging_face_config import read_hugging_face_config
from llm_engine.hugging_face_tokens import FolderTokens
from llm_engine.layer_config import LayerConfig, Rope
from llm_engine.model_config import Activation, ExpertsConfig, ModelConfig
from llm_engine.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from serving_core.errors import ModelFileError
from tests.tiny_model_folder import TINY_CONFIG, write_json

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

YARN = {"rope_type": "yarn", "factor": 2.0}

TOKENS = FolderTokens(num_tokens=267, num_plain_tokens=267, eos_token_ids=frozenset({2}))


def read(folder: Path, **changes: Any) -> ModelConfig:
    """The tiny config with ``changes``; a value of None is a null in the file."""
    write_json(folder / "config.json", {**TINY_CONFIG, **changes})
    return read_hugging_face_config(folder, tokens=TOKENS, num_tensors=100)


def rope_of(config: ModelConfig) -> Rope:
    """The rotary embedding that all layers share."""
    (rope,) = {layer.rope for layer in config.layers}
    assert rope is not None
    return rope


def read_family_config(folder: Path, model_type: str, architecture: str, **changes: Any) -> ModelConfig:
    """The tiny config as one of another family, with four layers."""
    return read(folder, **{"num_hidden_layers": 4, "model_type": model_type, "architectures": [architecture], **changes})


def test_the_config_is_that_of_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, vocab_size=272) == ModelConfig(
        layers=(LayerConfig(rope=Rope(theta=10_000.0)),) * 2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        feed_forward_size=128,
        vocab_size=272,
        num_tokens=267,
        max_model_len=512,
        rms_norm_eps=1e-5,
        attention_scale=0.25,
        is_tied=True,
    )


def test_values_with_a_known_default_may_be_missing(tmp_path: Path) -> None:
    keys = ("num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
    config = read(tmp_path, **dict.fromkeys(keys))
    assert (config.num_kv_heads, rope_of(config).theta, config.rms_norm_eps, config.is_tied) == (4, 10_000.0, 1e-6, False)
    assert config.max_model_len == 2048


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "holds a model of type 'gemma3'; supported are 'llama', 'mistral', 'smollm3'"),
        ({"model_type": None}, "holds a model of type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.* for architectures"),
        ({"hidden_act": "gelu"}, "has 'gelu' for hidden_act, which must be 'silu'"),
        ({"sliding_window": 64}, "has 64 for sliding_window, which must be absent"),
        ({"quantization_config": {"bits": 4}}, "for quantization_config, which must be absent"),
        ({"layer_types": ["full_attention"] * 2}, "for layer_types, which must be absent"),
        ({"num_local_experts": 8}, "has 8 for num_local_experts, which must be absent"),
        ({"final_logit_softcapping": 30.0}, "has 30.0 for final_logit_softcapping, which must be False"),
        ({"attn_logit_softcapping": 50.0}, "has 50.0 for attn_logit_softcapping, which must be absent"),
        ({"hidden_size": None}, "lacks hidden_size, which must be a whole number from 1 to"),
        ({"num_hidden_layers": "two"}, "has 'two' for num_hidden_layers"),
        ({"num_hidden_layers": True}, "has True for num_hidden_layers"),
        ({"num_key_value_heads": 3}, "4 query heads of 16 on 3 key-value heads"),
        ({"num_attention_heads": 999}, "999 query heads of 1 on 2 key-value heads"),
        ({"max_position_embeddings": 1}, "has 1 for max_position_embeddings, which must be a whole number from 2"),
        ({"rms_norm_eps": 10**400}, "for rms_norm_eps, which must be a number from 1e-18"),
        ({"rope_theta": float("nan")}, "has nan for rope_theta"),
        ({"rope_theta": 1, "rope_scaling": YARN}, "has 1 for rope_theta, which must be a number from 2"),
        ({"rope_scaling": {**YARN, "beta_fast": 1e-320}}, "for beta_fast, which must be a number from 1e-18"),
        ({"rope_scaling": {**YARN, "factor": 1e308}}, "has 1e.308 for factor"),
        ({"rope_scaling": {**YARN, "factor": 1e10}}, "for factor, which must be at most 2097152 for a window of 512"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 10**400}}, "for original_max_position_embeddings"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 10**400}}, "for original_max_position_embeddings"),
        ({"attention_bias": "yes"}, "has 'yes' for attention_bias, which must be true or false"),
        ({"vocab_size": 266}, "267 tokens but embeddings for 266"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling, has 'dynamic' for type, which must be 'default'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling, lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "has 4.0 for high_freq_factor, which must be above"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "has 0.5 for partial_rotary_factor"),
        ({"rope_scaling": "linear"}, "has 'linear' for rope_scaling, which must be an object"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        read(tmp_path, **changes)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"config\.json (is not a JSON file|must hold a JSON object)"):
        read_hugging_face_config(tmp_path, tokens=TOKENS, num_tensors=100)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json cannot be read: No such file"):
        read_hugging_face_config(tmp_path, tokens=TOKENS, num_tensors=100)


def test_scaling_is_read_in_old_and_new_words(tmp_path: Path) -> None:
    linear = LinearScaling(factor=2.0)
    assert rope_of(read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})).scaling == linear
    config = read(tmp_path, rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 5e5})
    assert rope_of(config) == Rope(theta=5e5, scaling=linear)
    assert rope_of(read(tmp_path, rope_scaling={"rope_type": "default"})).scaling is None
    assert rope_of(read(tmp_path, rope_scaling=LLAMA3)).scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_window=512
    )


def test_yarn_stretches_the_window(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = read(tmp_path, max_position_embeddings=128, rope_scaling=yarn)
    assert config.max_model_len == 512
    scaling = rope_of(config).scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(1.1386, abs=1e-4)
    assert read(tmp_path, rope_scaling=yarn).max_model_len == 512, "this file states the stretched window already"


def test_mistral_has_a_window_unless_it_is_null(tmp_path: Path) -> None:
    def window(**changes: Any) -> set[int | None]:
        config = read_family_config(tmp_path, "mistral", "MistralForCausalLM", **changes)
        return {layer.sliding_window for layer in config.layers}

    assert window(sliding_window=64) == {64}
    assert window(sliding_window=None) == {None}
    assert window() == {4096}


def test_smollm3_has_layers_without_positions(tmp_path: Path) -> None:
    def has_rope(**changes: Any) -> list[bool]:
        config = read_family_config(tmp_path, "smollm3", "SmolLM3ForCausalLM", **changes)
        return [layer.rope is not None for layer in config.layers]

    assert has_rope() == [True, True, True, False]
    assert has_rope(no_rope_layer_interval=2) == [True, False, True, False]
    assert has_rope(no_rope_layers=[0, 1, 1, 1, 0]) == [False, True, True, True]


def test_qwen_has_windows_from_a_layer_on(tmp_path: Path) -> None:
    def windows(**changes: Any) -> list[int | None]:
        config = read_family_config(tmp_path, "qwen2", "Qwen2ForCausalLM", **changes)
        assert (config.has_qkv_bias, config.has_attention_out_bias) == (True, False)
        return [layer.sliding_window for layer in config.layers]

    assert windows(sliding_window=64, max_window_layers=2) == [None] * 4, "it is switched off"
    assert windows(use_sliding_window=True, sliding_window=64, max_window_layers=2) == [None, None, 64, 64]
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, sliding_window=64, layer_types=types) == [64, None, None, 64]


def test_qwen3_has_experts_where_its_keys_say(tmp_path: Path) -> None:
    def read_moe(**changes: Any) -> ModelConfig:
        return read_family_config(tmp_path, "qwen3_moe", "Qwen3MoeForCausalLM", **changes)

    config = read_moe(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=96, norm_topk_prob=True)
    assert config.experts == ExpertsConfig(num_experts=16, num_chosen=4, feed_forward_size=96, is_normalized=True)
    assert [layer.has_experts for layer in config.layers] == [True] * 4
    config = read_moe(num_experts=16, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [layer.has_experts for layer in config.layers] == [False, True, False, False]


def test_gemma_has_layers_of_two_kinds(tmp_path: Path) -> None:
    def read_gemma(**changes: Any) -> ModelConfig:
        return read_family_config(tmp_path, "gemma3_text", "Gemma3ForCausalLM", **{"hidden_act": None, **changes})

    # 1. In the words of older files.
    config = read_gemma(
        sliding_window_pattern=2,
        sliding_window=64,
        rope_theta=2e6,
        rope_local_base_freq=5e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        query_pre_attn_scalar=16,
        final_logit_softcapping=30.0,
    )
    near = LayerConfig(rope=Rope(theta=5e3), sliding_window=64)
    far = LayerConfig(rope=Rope(theta=2e6, scaling=LinearScaling(factor=8.0)))
    assert config.layers == (near, far, near, far)
    assert (config.activation, config.embedding_scale, config.logit_soft_cap) == (Activation.GELU_TANH, 8.0, 30.0)
    assert (config.attention_scale, config.has_out_norms, config.has_query_key_norms) == (0.25, True, True)

    # 2. In those of newer ones.
    types = ["sliding_attention", "full_attention"] * 2
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    assert read_gemma(layer_types=types, sliding_window=64, rope_theta=None, rope_parameters=ropes).layers == config.layers

    # 3. With everything left out that may be.
    config = read_gemma(num_hidden_layers=6, rope_theta=None, head_dim=None, tie_word_embeddings=None)
    near, far = LayerConfig(rope=Rope(theta=1e4), sliding_window=4096), LayerConfig(rope=Rope(theta=1e6))
    assert config.layers == (near, near, near, near, near, far)
    assert (config.head_dim, config.attention_scale, config.is_tied) == (256, 1 / 16, True)


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes", "message"),
    [
        ("mistral", "MistralForCausalLM", {"sliding_window": 2**64}, "has 18446744073709551616 for sliding_window"),
        ("mistral", "MistralForCausalLM", {"attention_bias": True}, "has True for attention_bias, which must be False"),
        ("qwen2", "LlamaForCausalLM", {}, "for architectures, which must be"),
        ("qwen2", "Qwen2ForCausalLM", {"hidden_act": "gelu"}, "has 'gelu' for hidden_act, which must be 'silu'"),
        (
            "qwen2",
            "Qwen2ForCausalLM",
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types, which must be 'full_attention'",
        ),
        ("qwen3", "Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types, which must be .* each of 4 layers"),
        ("qwen3", "Qwen3ForCausalLM", {"num_experts": 8}, "has 8 for num_experts, which must be absent"),
        ("qwen3_moe", "Qwen3MoeForCausalLM", {"mlp_only_layers": [-1]}, "which must be a layer's number or a list of them"),
        ("qwen3_moe", "Qwen3MoeForCausalLM", {"num_experts": 4}, "lacks num_experts_per_tok, which must be at most 4"),
        ("qwen3_moe", "Qwen3MoeForCausalLM", {"num_experts": 2**28}, "states 1073741824 experts and holds 100 tensors"),
        (
            "smollm3",
            "SmolLM3ForCausalLM",
            {"no_rope_layers": [1, 0]},
            "no_rope_layers, which must be a list of 0 or 1 for each",
        ),
        ("gemma3_text", "Gemma3ForCausalLM", {"hidden_activation": "gelu"}, "'gelu' for hidden_activation"),
        ("gemma3_text", "Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping, which must be absent"),
        ("gemma3_text", "Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "has True for use_bidirectional_attention"),
        (
            "gemma3_text",
            "Gemma3ForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "rope_parameters, full_attention, has 'dynamic' for rope_type",
        ),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    model_type: str, architecture: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_family_config(tmp_path, model_type, architecture, **changes)
