"""Every model family: ours = transformers on tiny random weights, from a folder and from GGUF; no row depends on another."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.integration.test_reference import our_tokens, reference_tokens
from tests.tiny_families import FAMILIES, TinyFamily, make_tiny_model, write_tiny_family_folder, write_tiny_family_gguf
from tests.unit.llm_engine.tiny_engine import TinyEngine, skip_without_kernels

PROMPTS = [[3 + (7 * place + length) % 260 for place in range(length)] for length in (1, 16, 17, 100)]
LONG_PROMPT = [3 + (11 * place) % 263 for place in range(700)]
"""More than a block of keys longer than the window of those families that have one."""

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
every_gguf_family = pytest.mark.parametrize(
    "family", [pytest.param(family, id=name) for name, family in FAMILIES.items() if family.gguf is not None]
)


def assert_equal_to_reference(path: Path, model: Any) -> None:
    engine = TinyEngine(path, KVDType.FLOAT32)
    prompts = [*PROMPTS, LONG_PROMPT]
    for prompt in prompts:
        token = engine.prefill(prompt, chunk=48, max_tokens=len(prompt)).results[-1]
        assert token.logprobs is not None
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert all(abs(logprob - float(expected[token_id])) < 1e-4 for token_id, logprob in token.logprobs.top)
    expected_tokens = [reference_tokens(model, [prompt], 40)[0] for prompt in prompts]
    assert len({token for tokens in expected_tokens for token in tokens}) > 30, "the tiny model says something"
    assert our_tokens(engine, prompts, 40) == expected_tokens


@every_family
def test_a_folder_equals_transformers(family: TinyFamily, tmp_path: Path) -> None:
    model = make_tiny_model(family)
    assert_equal_to_reference(write_tiny_family_folder(tmp_path / "tiny", model), model)


@every_gguf_family
def test_a_gguf_file_equals_transformers(family: TinyFamily, tmp_path: Path) -> None:
    model = make_tiny_model(family)
    assert_equal_to_reference(write_tiny_family_gguf(tmp_path / "tiny.gguf", family, model), model)


@every_family
def test_the_native_kernels_are_as_near_to_the_reference_as_torch_in_bfloat16(family: TinyFamily, tmp_path: Path) -> None:
    skip_without_kernels()
    model = make_tiny_model(family)
    path = write_tiny_family_folder(tmp_path / "tiny", model)
    native, eager = TinyEngine(path, KVDType.BFLOAT16), TinyEngine(path, KVDType.BFLOAT16, eager_phases=tuple(PhaseName))
    assert eager.loaded.phases[PhaseName.DECODE].library is None
    plain_error = error_beside_reference(eager, model, PhaseName.PREFILL)
    assert plain_error < 0.2
    assert error_beside_reference(eager, model, PhaseName.DECODE) == plain_error
    for phase in PhaseName:
        assert native.loaded.phases[phase].library is not None
        assert error_beside_reference(native, model, phase) < 1.2 * plain_error + 0.01


@every_family
@pytest.mark.parametrize("cache_dtype", [KVDType.BFLOAT16, KVDType.INT8])
def test_replayed_steps_change_no_bit(family: TinyFamily, cache_dtype: KVDType, tmp_path: Path) -> None:
    skip_without_kernels()
    path = write_tiny_family_folder(tmp_path / "tiny", make_tiny_model(family))
    engines = [TinyEngine(path, KVDType.BFLOAT16, cache_dtype=cache_dtype, max_recorded_rows=max_rows) for max_rows in (0, 4)]
    fed = [[engine.prefill(prompt, chunk=48, max_tokens=140) for prompt in PROMPTS] for engine in engines]
    rng = random.Random(0)
    for _ in range(24):
        order = rng.sample(range(len(PROMPTS)), rng.randint(1, len(PROMPTS)))
        tokens = [rng.choices(range(3, 263), k=rng.choice((1, 1, 1, 2))) for _ in order]  # up to 8: more than are recorded
        for engine, sequences in zip(engines, fed, strict=True):
            rows = [(sequences[index], own) for index, own in zip(order, tokens, strict=True)]
            engine.step(*rows, phase=PhaseName.DECODE)
    for eager, replayed in zip(*fed, strict=True):
        assert eager.results == replayed.results
        assert torch.equal(engines[0].stored(eager), engines[1].stored(replayed))


def error_beside_reference(engine: TinyEngine, model: Any, phase: PhaseName) -> float:
    """Root mean square, over the likeliest tokens' logprobs."""
    errors: list[float] = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        token = engine.prefill(prompt, chunk=48, max_tokens=len(prompt), phase=phase).results[-1]
        assert token.logprobs is not None
        errors += [logprob - float(expected[token_id]) for token_id, logprob in token.logprobs.top]
    return float(torch.tensor(errors).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [KVDType.FLOAT32, KVDType.BFLOAT16])
@every_family
def test_chunks_and_neighbours_change_no_bit(family: TinyFamily, dtype: KVDType, tmp_path: Path) -> None:
    engine = TinyEngine(write_tiny_family_folder(tmp_path / "tiny", make_tiny_model(family)), dtype, num_pages=512)
    prompt, short = LONG_PROMPT[:590], PROMPTS[-1]

    # 1. A prompt, cut differently.
    whole = engine.prefill(prompt, chunk=len(prompt), max_tokens=640)
    others = [engine.prefill(prompt, chunk=chunk, max_tokens=640) for chunk in (37, 64, 511)]
    for other in others:
        assert other.results[-1] == whole.results[-1]
        assert torch.equal(engine.stored(other), engine.stored(whole))

    # 2. Decoded alone, together, and beside a prompt.
    stranger = engine.new_sequence(len(short))
    for index in range(3):
        token = [whole.results[-1].token_id]
        engine.step((whole, token))
        engine.step((others[1], token), (others[0], token))
        engine.step((stranger, short[index * 16 : index * 16 + 16]), (others[2], token))
    for other in others:
        assert other.results[-3:] == whole.results[-3:]
        assert torch.equal(engine.stored(other), engine.stored(whole))
