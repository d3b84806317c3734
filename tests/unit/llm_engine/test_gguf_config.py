from __future__ import annotations

from pathlib import Path

import pytest

from llm_engine.gguf_config import read_eos_token_ids, read_gguf_config
from llm_engine.gguf_file import GgufFile
from llm_engine.layer_config import LayerConfig, Rope
from llm_engine.model_config import Activation, ExpertsConfig
from llm_engine.rope_scaling import LinearScaling, RopeScaling
from serving_core.errors import ModelFileError
from serving_core.gguf_header import ArrayLength, MetadataValue
from serving_core.kv_page_layout import KVDType, KVPageLayout
from tests.tiny_model import write_tiny_gguf


@pytest.fixture
def file(tmp_path: Path) -> GgufFile:
    return GgufFile(write_tiny_gguf(tmp_path / "tiny.gguf"))


def scaling_of(file: GgufFile) -> RopeScaling | None:
    (rope,) = {layer.rope for layer in read_gguf_config(file).layers}
    assert rope is not None
    return rope.scaling


def renamed(file: GgufFile, architecture: str, **values: MetadataValue) -> GgufFile:
    """The file with its metadata under another architecture's keys, and ``values`` added, whose dots are written as ``__``."""
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in file.metadata.items()}
    file.metadata = metadata | {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}
    file.metadata["general.architecture"] = architecture
    return file


def test_the_page_layout_follows_from_the_config(file: GgufFile) -> None:
    assert read_gguf_config(file).page_layout(page_size=32, dtype=KVDType.BFLOAT16) == KVPageLayout(
        num_layers=2, num_kv_heads=2, head_dim=16, page_size=32, dtype=KVDType.BFLOAT16
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.expert_count", 8, "has 8 for llama.expert_count, which must be 0"),
        ("llama.attention.sliding_window", 64, "has 64 for llama.attention.sliding_window, which must be 0"),
        ("llama.attention.scale", 0.5, "has 0.5 for llama.attention.scale, which must be 0"),
        ("llama.attn_logit_softcapping", 50.0, "has 50.0 for llama.attn_logit_softcapping, which must be 0"),
        ("llama.rope.scaling.type", "yarn", "has 'yarn' for llama.rope.scaling.type, which must be 'none' or 'linear'"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count, which must be 16"),
        ("llama.attention.value_length", 32, "value_length, which must be 16"),
        ("llama.block_count", 0, "has 0 for llama.block_count, which must be a whole number from 1 to 1073741824"),
        ("llama.block_count", 2**30, "states 1073741824 layers and holds 20 tensors"),
        ("llama.block_count", 2**32, "has 4294967296 for llama.block_count"),
        ("llama.context_length", 1, "has 1 for llama.context_length, which must be a whole number from 2"),
        ("llama.context_length", 2**40, "has 1099511627776 for llama.context_length"),
        ("llama.attention.head_count", ArrayLength(2), "has a list of 2 for llama.attention.head_count"),
        ("llama.attention.head_count", 999, "999 query heads of 1 on 2 key-value heads"),
        ("llama.block_count", "two", "has 'two' for llama.block_count"),
        ("llama.block_count", True, "has True for llama.block_count"),
        ("llama.rope.freq_base", float("nan"), "freq_base, which must be a number from 2 to 1e"),
        ("llama.rope.freq_base", 1e-300, "has 1e-300 for llama.rope.freq_base"),
        ("llama.final_logit_softcapping", 1e-300, "softcapping, which must be a number from 1e-18 to 1e"),
        ("llama.attention.head_count_kv", 3, "4 query heads of 16 on 3 key-value heads"),
    ],
)
def test_what_is_not_computed_is_refused(file: GgufFile, key: str, value: MetadataValue, message: str) -> None:
    file.metadata[key] = value
    with pytest.raises(ModelFileError, match=message):
        read_gguf_config(file)


def test_a_missing_size_is_named(file: GgufFile) -> None:
    del file.metadata["llama.embedding_length"]
    with pytest.raises(ModelFileError, match=r"lacks llama\.embedding_length"):
        read_gguf_config(file)


def test_values_with_a_known_default_may_be_missing(file: GgufFile) -> None:
    for key in ("llama.rope.freq_base", "llama.rope.dimension_count", "llama.attention.head_count_kv"):
        del file.metadata[key]
    config = read_gguf_config(file)
    assert (config.layers[0].rope, config.num_kv_heads) == (Rope(theta=10_000.0), 4)


def test_linear_scaling_is_read(file: GgufFile) -> None:
    file.metadata["llama.rope.scaling.factor"] = 4.0
    assert scaling_of(file) is None, "a factor without a type scales nothing"
    file.metadata["llama.rope.scaling.type"] = "linear"
    assert scaling_of(file) == LinearScaling(factor=4.0)


def test_a_sliding_window_has_a_bound(file: GgufFile) -> None:
    with pytest.raises(ModelFileError, match=r"has 18446744073709551615 for gemma3\.attention\.sliding_window"):
        read_gguf_config(renamed(file, "gemma3", attention__sliding_window=2**64 - 1))


def test_ends_of_turn_and_message_end_an_answer_too(file: GgufFile) -> None:
    assert read_eos_token_ids(file) == {2}
    file.metadata["tokenizer.ggml.eot_token_id"] = 7
    file.metadata["tokenizer.ggml.eom_token_id"] = 8
    assert read_eos_token_ids(file) == {2, 7, 8}


@pytest.mark.parametrize("token_id", [-1, 267, True, "2"])
def test_an_end_token_that_is_none_is_refused(token_id: MetadataValue, file: GgufFile) -> None:
    file.metadata["tokenizer.ggml.eot_token_id"] = token_id
    with pytest.raises(ModelFileError, match=r"eot_token_id, which must be a token's id, below 267"):
        read_eos_token_ids(file)


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    with GgufFile(write_tiny_gguf(tmp_path / "tiny.gguf")) as file:
        info = file.tensors["token_embd.weight"]
        file.tensors["token_embd.weight"] = type(info)(
            name=info.name, shape=(266, 64), type=info.type, offset=info.offset, num_bytes=info.num_bytes
        )
        with pytest.raises(ModelFileError, match="267 tokens but embeddings for 266"):
            read_gguf_config(file)


def test_smollm3_has_layers_without_positions(file: GgufFile) -> None:
    renamed(file, "smollm3", block_count=8)
    assert [layer.rope is None for layer in read_gguf_config(file).layers] == [False, False, False, True] * 2


def test_qwen_has_biases_or_norms(file: GgufFile) -> None:
    config = read_gguf_config(renamed(file, "qwen2"))
    assert (config.has_qkv_bias, config.has_attention_out_bias, config.has_query_key_norms) == (True, False, False)
    file.metadata = {key.replace("qwen2.", "llama."): value for key, value in file.metadata.items()}
    config = read_gguf_config(renamed(file, "qwen3"))
    assert (config.has_qkv_bias, config.has_attention_out_bias, config.has_query_key_norms) == (False, False, True)


def test_experts_are_read(file: GgufFile) -> None:
    renamed(file, "qwen3moe", expert_count=8, expert_used_count=2, expert_feed_forward_length=96)
    config = read_gguf_config(file)
    assert config.experts == ExpertsConfig(num_experts=8, num_chosen=2, feed_forward_size=96, is_normalized=True)
    assert all(layer.has_experts for layer in config.layers)
    file.metadata["qwen3moe.expert_used_count"] = 9
    with pytest.raises(ModelFileError, match=r"has 9 for qwen3moe\.expert_used_count, which must be at most 8"):
        read_gguf_config(file)


def test_gemma_has_layers_of_two_kinds(file: GgufFile) -> None:
    renamed(file, "gemma3", block_count=7, attention__sliding_window=32, final_logit_softcapping=30.0)
    file.metadata |= {"gemma3.rope.freq_base": 1e6, "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = read_gguf_config(file)
    near = LayerConfig(rope=Rope(theta=10_000.0), sliding_window=32)
    far = LayerConfig(rope=Rope(theta=1e6, scaling=LinearScaling(factor=8.0)))
    assert config.layers == (near, near, near, near, near, far, near)
    assert (config.activation, config.embedding_scale, config.logit_soft_cap) == (Activation.GELU_TANH, 8.0, 30.0)
    assert (config.attention_scale, config.has_out_norms, config.has_query_key_norms) == (0.25, True, True)
    file.metadata["gemma3.attention.sliding_window_pattern"] = 5
    with pytest.raises(ModelFileError, match=r"has 5 for gemma3\.attention\.sliding_window_pattern, which must be 6"):
        read_gguf_config(file)


def test_the_largest_gemma_scales_queries_as_its_width_says(tmp_path: Path) -> None:
    with GgufFile(write_tiny_gguf(tmp_path / "deep.gguf", num_layers=8)) as file:
        renamed(file, "gemma3", block_count=62, attention__sliding_window=32, attention__key_length=32)
        file.metadata |= {"gemma3.attention.value_length": 32, "gemma3.rope.dimension_count": 32}
        assert read_gguf_config(file).attention_scale == 0.25
        file.metadata["gemma3.block_count"] = 48
        assert read_gguf_config(file).attention_scale == pytest.approx(32**-0.5)


def test_gemma_ends_an_answer_with_the_turn(tmp_path: Path) -> None:
    with GgufFile(write_tiny_gguf(tmp_path / "tiny.gguf", tokens={9: "<end_of_turn>"})) as file:
        assert read_eos_token_ids(file) == {2}
        assert read_eos_token_ids(renamed(file, "gemma3")) == {2, 9}
        file.metadata["tokenizer.ggml.eot_token_id"] = 7
        assert read_eos_token_ids(file) == {2, 7}, "what the file says comes first"
