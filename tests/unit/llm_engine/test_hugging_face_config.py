from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llm_engine.hugging_face_config import read_hugging_face_config
from llm_engine.model_config import ModelConfig
from llm_engine.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from serving_core.errors import ModelFileError
from tests.tiny_model_folder import TINY_CONFIG, write_json

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(folder: Path, **changes: Any) -> ModelConfig:
    """The tiny config with ``changes``; a value of None is a null in the file."""
    write_json(folder / "config.json", {**TINY_CONFIG, **changes})
    return read_hugging_face_config(folder, num_tokens=267)


def test_the_config_is_that_of_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, vocab_size=272) == ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        feed_forward_size=128,
        vocab_size=272,
        num_tokens=267,
        max_model_len=512,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        is_tied=True,
    )


def test_values_with_a_known_default_may_be_missing(tmp_path: Path) -> None:
    keys = ("num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
    config = read(tmp_path, **dict.fromkeys(keys))
    assert (config.num_kv_heads, config.rope_theta, config.rms_norm_eps, config.is_tied) == (4, 10_000.0, 1e-6, False)
    assert config.max_model_len == 2048


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "holds a model of type 'gemma3'; supported is 'llama'"),
        ({"model_type": None}, "holds a model of type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.* for architectures"),
        ({"hidden_act": "gelu"}, "has 'gelu' for hidden_act, which must be 'silu'"),
        ({"sliding_window": 64}, "has 64 for sliding_window, which must be absent"),
        ({"quantization_config": {"bits": 4}}, "for quantization_config, which must be absent"),
        ({"hidden_size": None}, "lacks hidden_size, which must be a whole number of at least 1"),
        ({"num_hidden_layers": "two"}, "has 'two' for num_hidden_layers"),
        ({"num_hidden_layers": True}, "has True for num_hidden_layers"),
        ({"num_key_value_heads": 3}, "4 query heads of 16 on 3 key-value heads"),
        ({"rope_theta": float("nan")}, "has nan for rope_theta"),
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
        read_hugging_face_config(tmp_path, num_tokens=267)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json cannot be read: No such file"):
        read_hugging_face_config(tmp_path, num_tokens=267)


def test_scaling_is_read_in_old_and_new_words(tmp_path: Path) -> None:
    linear = LinearScaling(factor=2.0)
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == linear
    config = read(tmp_path, rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 5e5})
    assert (config.rope_scaling, config.rope_theta) == (linear, 5e5)
    assert read(tmp_path, rope_scaling={"rope_type": "default"}).rope_scaling is None
    assert read(tmp_path, rope_scaling=LLAMA3).rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_window=512
    )


def test_yarn_stretches_the_window(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = read(tmp_path, max_position_embeddings=128, rope_scaling=yarn)
    assert config.max_model_len == 512
    assert isinstance(config.rope_scaling, YarnScaling)
    assert config.rope_scaling.attention_factor == pytest.approx(1.1386, abs=1e-4)
    assert read(tmp_path, rope_scaling=yarn).max_model_len == 512, "this file states the stretched window already"
