from __future__ import annotations

from pathlib import Path

import pytest

from llm_engine.gguf_config import read_eos_token_ids, read_gguf_config
from llm_engine.gguf_file import GgufFile
from llm_engine.rope_scaling import LinearScaling
from serving_core.errors import ModelFileError
from serving_core.gguf_header import MetadataValue
from serving_core.kv_page_layout import KVDType, KVPageLayout
from tests.tiny_model import write_tiny_gguf


@pytest.fixture
def file(tmp_path: Path) -> GgufFile:
    return GgufFile(write_tiny_gguf(tmp_path / "tiny.gguf"))


def test_the_page_layout_follows_from_the_config(file: GgufFile) -> None:
    assert read_gguf_config(file).page_layout(page_size=32, dtype=KVDType.BFLOAT16) == KVPageLayout(
        num_layers=2, num_kv_heads=2, head_dim=16, page_size=32, dtype=KVDType.BFLOAT16
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.expert_count", 8, "has 8 for llama.expert_count, which must be 0"),
        ("llama.rope.scaling.type", "yarn", "has 'yarn' for llama.rope.scaling.type, which must be 'none' or 'linear'"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count, which must be 16"),
        ("llama.attention.value_length", 32, "value_length, which must be 16"),
        ("llama.block_count", 0, "has 0 for llama.block_count, which must be a number of at least 1"),
        ("llama.block_count", 2**32, "states 4294967296 layers and holds 20 tensors"),
        ("llama.block_count", "two", "has 'two' for llama.block_count"),
        ("llama.block_count", True, "has True for llama.block_count"),
        ("llama.rope.freq_base", float("nan"), "freq_base, which must be a number above 0"),
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
    assert (config.rope_theta, config.num_kv_heads) == (10_000.0, 4)


def test_linear_scaling_is_read(file: GgufFile) -> None:
    file.metadata["llama.rope.scaling.factor"] = 4.0
    assert read_gguf_config(file).rope_scaling is None, "a factor without a type scales nothing"
    file.metadata["llama.rope.scaling.type"] = "linear"
    assert read_gguf_config(file).rope_scaling == LinearScaling(factor=4.0)


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
