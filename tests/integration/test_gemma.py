"""Ours = the reference with the packaged Gemma model, in float32, on real text. transformers reads the same file."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from llm_engine.native.packed_weight import unpack
from llm_engine.open_checkpoint import open_checkpoint, read_stored_model
from llm_engine.packed_weights import PackedWeights
from llm_engine.plain_weights import PlainWeights
from llm_engine.tensor_reader import TensorReader
from llm_engine.weight_form import WeightForm
from llm_engine.weight_plan import plan_weights
from router.tokenizer import read_tokenizer
from serving_core.engine_config import Quantization
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType
from tests.integration.test_reference import QUESTIONS, our_tokens, reference_tokens
from tests.unit.llm_engine.tiny_engine import TinyEngine
from twinpool.model_source import find_model

NUM_QUESTIONS = 49
NUM_TOKENS = 64
SLIDING_WINDOW = 512


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return find_model("gemma-3-270m").path
    except ConfigError as error:
        pytest.skip(str(error))


def real_prompts(path: Path, num_questions: int) -> list[list[int]]:
    """Questions, and a text of many that is longer than the sliding window, each after the token that begins a text."""
    questions = [json.loads(line)["question"] for line in QUESTIONS.read_text().splitlines()]
    tokenizer = read_tokenizer(path)
    texts = [*(f"Question: {question}\nAnswer:" for question in questions[:num_questions]), "\n\n".join(questions[:16])]
    return [list(tokenizer.encode(text, add_special_tokens=True)) for text in texts]


def reference(path: Path) -> Any:
    # Not from_pretrained, which wants a package that the rest does not need.
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name), dtype=torch.float32)
    load: Any = load_gguf_checkpoint
    tensors = load(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # which is the embedding
    model.generation_config.eos_token_id = None  # generates on, as ours does when driven by hand
    return model.eval()


@pytest.mark.slow  # tiny models of its family are compared in every run
@pytest.mark.timeout(3600)
def test_tokens_equal_those_of_transformers(path: Path) -> None:
    with torch.inference_mode():
        prompts = real_prompts(path, NUM_QUESTIONS)
        assert len(prompts[-1]) > SLIDING_WINDOW + NUM_TOKENS
        ours = our_tokens(TinyEngine(path, KVDType.FLOAT32, num_pages=1024), prompts, NUM_TOKENS)
        model = reference(path)
        for index, (prompt, own) in enumerate(zip(prompts, ours, strict=True)):
            assert [own] == reference_tokens(model, [prompt], NUM_TOKENS), f"prompt {index}"


def test_chunks_and_neighbours_change_no_bit(path: Path) -> None:
    engine = TinyEngine(path, KVDType.BFLOAT16)
    prompt = real_prompts(path, 0)[0][: SLIDING_WINDOW + 90]
    whole = engine.prefill(prompt, chunk=len(prompt), max_tokens=640)
    other = engine.prefill(prompt, chunk=101, max_tokens=640)
    stranger = engine.new_sequence(64)
    for index in range(3):
        token = [whole.results[-1].token_id]
        engine.step((whole, token))
        engine.step((stranger, prompt[index * 16 : index * 16 + 16]), (other, token))
    assert other.results[-4:] == whole.results[-4:]
    assert torch.equal(engine.stored(other), engine.stored(whole))


def test_decode_keeps_the_blocks_of_the_file(path: Path) -> None:
    plan = plan_weights(read_stored_model(path), Quantization.AUTO)
    assert plan.forms["layers.0.attention_out"] is WeightForm.INT4  # Q4_K
    assert plan.forms["layers.0.qkv"] is WeightForm.INT8  # Q5_0 and Q8_0
    assert plan.is_embedding_shared  # Q8_0
    no_kernels: Any = None
    with closing(open_checkpoint(path)) as checkpoint:
        reader = TensorReader(checkpoint, lambda num_bytes: None)
        packed, plain = PackedWeights(reader, plan, no_kernels), PlainWeights(reader, torch.float32)
        for name in ("layers.0.attention_out", "layers.0.qkv", "layers.0.gate_up"):
            assert torch.equal(unpack(packed.matrix(name).weight), plain.matrix(name).weight), name
        rounded = [unpack(packed.matrix(f"layers.{layer}.down").weight) for layer in (0, 17)]
        exact = [plain.matrix(f"layers.{layer}.down").weight for layer in (0, 17)]
    for own, other in zip(rounded, exact, strict=True):
        assert (own - other).square().mean().sqrt() < 0.007 * other.std()  # Q6_K is rounded once more
    assert not all(map(torch.equal, rounded, exact))
