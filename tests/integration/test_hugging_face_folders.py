"""Folders as Hugging Face lays them out: ours = transformers on tiny random Llamas, and = the GGUF file of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import decoders
from transformers import LlamaForCausalLM

from llm_engine.load_model import load_model
from llm_engine.open_checkpoint import read_model_config
from router.gguf_tokenizer import read_gguf_tokenizer
from router.tokenizer import read_tokenizer
from serving_core.kv_page_layout import KVDType
from tests.integration.test_reference import (
    default_model_path,
    our_tokens,
    reference_model,
    reference_tokens,
)
from tests.tiny_model_folder import write_json, write_tiny_folder
from tests.unit.llm_engine.tiny_engine import TinyEngine

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PROMPTS = [[3 + (7 * place + length) % 260 for place in range(length)] for length in (1, 16, 17, 100)]


def reference(folder: Path) -> Any:
    """transformers' own reading of the folder."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None  # generates on, as ours does when driven by hand
    return model.eval()


def reference_logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    return logprobs


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="plain"),
        pytest.param({"tie_word_embeddings": False}, id="untied"),
        pytest.param({"head_dim": 32, "num_key_value_heads": 4}, id="wide heads"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"rope_scaling": {"type": "linear", "factor": 3.0}}, id="linear"),
        pytest.param({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}, id="llama3"),
        pytest.param({"rope_scaling": YARN}, id="yarn"),
        pytest.param({"rope_scaling": {**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0}}, id="yarn unrounded"),
        pytest.param({"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}}, id="yarn mscale"),
        pytest.param({"rope_scaling": {**YARN, "attention_factor": 0.9}}, id="yarn attention factor"),
        pytest.param({"rope_theta": 500.0, "rope_parameters": {"rope_theta": 20000.0, **YARN}}, id="yarn in new words"),
    ],
)
def test_tiny_models_equal_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", config=config, num_shards=3)
    model, engine = reference(folder), TinyEngine(folder, KVDType.FLOAT32)
    for prompt in PROMPTS:
        token = engine.prefill(prompt, chunk=48, max_tokens=len(prompt)).results[-1]
        assert token.logprobs is not None
        expected = reference_logprobs(model, prompt)
        assert all(abs(logprob - float(expected[token_id])) < 1e-4 for token_id, logprob in token.logprobs.top)
    assert our_tokens(engine, PROMPTS, 24) == [reference_tokens(model, [prompt], 24)[0] for prompt in PROMPTS]


def test_scaling_reaches_beyond_the_first_window(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", config={"max_position_embeddings": 64, "rope_scaling": YARN})
    assert read_model_config(folder).max_model_len == 256
    prompt = [3 + place % 260 for place in range(200)]
    assert our_tokens(TinyEngine(folder, KVDType.FLOAT32), [prompt], 24) == reference_tokens(reference(folder), [prompt], 24)


def write_default_folder(folder: Path) -> None:
    """The default model's weights as float32 shards, written by transformers, and its tokenizer."""
    path = default_model_path()
    reference_model(path).save_pretrained(folder, max_shard_size="200MB")
    parts = read_gguf_tokenizer(path)
    parts.back_end.decoder = decoders.ByteLevel()
    parts.back_end.save(str(folder / "tokenizer.json"))
    texts, bos_id, eos_id = parts.vocabulary.texts, parts.vocabulary.bos_id, parts.vocabulary.eos_id
    assert bos_id is not None
    assert eos_id is not None
    write_json(folder / "tokenizer_config.json", {"bos_token": texts[bos_id], "eos_token": texts[eos_id]})


def test_the_default_model_as_a_folder_equals_its_gguf(tmp_path: Path) -> None:
    path = default_model_path()
    write_default_folder(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1

    from_folder, from_gguf = read_tokenizer(tmp_path), read_tokenizer(path)
    texts = ["The three primary colours are", "def fibonacci(n):\n\treturn", "<|im_start|>user\nNaïve 12 x²?<|im_end|>\n"]
    prompts = [list(from_folder.encode(text, add_special_tokens=True)) for text in texts]
    assert prompts == [list(from_gguf.encode(text, add_special_tokens=True)) for text in texts]
    for attribute in ("vocab_size", "special_token_ids"):
        assert getattr(from_folder, attribute) == getattr(from_gguf, attribute)
    assert all(from_folder.token_bytes(token) == from_gguf.token_bytes(token) for token in range(from_gguf.vocab_size))

    ours = our_tokens(TinyEngine(tmp_path, KVDType.FLOAT32), prompts, 16)
    assert ours == our_tokens(TinyEngine(path, KVDType.FLOAT32), prompts, 16)
    ends = [load_model(source, dtype=KVDType.BFLOAT16).eos_token_ids for source in (tmp_path, path)]
    assert ends[0] == ends[1]
