from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from llm_engine.load_model import load_model
from llm_engine.open_checkpoint import read_model_config
from serving_core.engine_config import Quantization
from serving_core.errors import ConfigError, ModelFileError
from serving_core.kv_page_layout import WEIGHT_DTYPES, KVDType
from serving_core.worker_status import PhaseName
from tests.tiny_model import TINY_EOS_TOKEN_ID, write_tiny_gguf
from tests.unit.llm_engine.tiny_config import TINY_CONFIG
from tests.unit.llm_engine.tiny_engine import TinyEngine, skip_without_kernels

PROMPT = [5, 90, 17, 200, 33, 8]


def test_the_config_is_that_of_the_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", is_tied=False)
    expected = replace(TINY_CONFIG, is_tied=False)
    assert read_model_config(path) == expected
    loaded = load_model(path, dtype=KVDType.BFLOAT16)
    assert loaded.config == expected
    assert loaded.eos_token_ids == {TINY_EOS_TOKEN_ID}
    assert {model.decoder.dtype for model in loaded.phases.values()} == {torch.bfloat16}
    assert len(loaded.model_print) == 64


def test_a_tied_head_costs_no_memory(tmp_path: Path) -> None:
    tied = load_model(write_tiny_gguf(tmp_path / "tied.gguf"), dtype=KVDType.FLOAT32)
    untied = load_model(write_tiny_gguf(tmp_path / "untied.gguf", is_tied=False), dtype=KVDType.FLOAT32)
    assert untied.weight_bytes - tied.weight_bytes == 267 * 64 * 4


def test_phases_that_compute_alike_share_their_weights(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_gguf(tmp_path / "tiny.gguf"), dtype=KVDType.FLOAT32)
    prefill, decode = loaded.phases[PhaseName.PREFILL], loaded.phases[PhaseName.DECODE]
    assert prefill is decode
    assert loaded.weight_bytes == prefill.weight_bytes
    assert prefill.arithmetic == "torch float32"


def test_each_phase_has_the_form_it_asked_for_and_a_worker_no_other(tmp_path: Path) -> None:
    skip_without_kernels()
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type=GGMLQuantizationType.Q4_1)
    both = load_model(path, dtype=KVDType.BFLOAT16)
    arithmetic = {phase: model.arithmetic for phase, model in both.phases.items()}
    assert arithmetic == {PhaseName.PREFILL: "native bfloat16", PhaseName.DECODE: "native auto"}
    alone = load_model(path, dtype=KVDType.BFLOAT16, quantizations={PhaseName.DECODE: Quantization.AUTO})
    assert list(alone.phases) == [PhaseName.DECODE]
    assert alone.weight_bytes == both.phases[PhaseName.DECODE].weight_bytes < both.phases[PhaseName.PREFILL].weight_bytes
    assert both.weight_bytes == sum(model.weight_bytes for model in both.phases.values())
    assert alone.model_print == both.model_print


def test_phases_whose_forms_come_to_the_same_share_one_model(tmp_path: Path) -> None:
    skip_without_kernels()
    loaded = load_model(write_tiny_gguf(tmp_path / "tiny.gguf"), dtype=KVDType.BFLOAT16)  # NONE, and AUTO of plain weights
    prefill, decode = loaded.phases[PhaseName.PREFILL], loaded.phases[PhaseName.DECODE]
    assert prefill is decode
    assert prefill.arithmetic == "native bfloat16"
    assert loaded.weight_bytes == prefill.weight_bytes


def test_without_kernels_torch_computes_both_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_engine.load_model.find_library", lambda: "need a processor with AVX-512 BF16")
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(path, dtype=KVDType.BFLOAT16)
    assert loaded.phases[PhaseName.PREFILL] is loaded.phases[PhaseName.DECODE]
    assert loaded.phases[PhaseName.PREFILL].arithmetic == "torch bfloat16"
    with pytest.raises(ConfigError, match=r"--decode-quantization is int8, which .* kernels, which need a processor"):
        load_model(path, dtype=KVDType.BFLOAT16, quantizations={PhaseName.DECODE: Quantization.INT8})


def test_an_eager_phase_is_computed_by_torch(tmp_path: Path) -> None:
    skip_without_kernels()
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type=GGMLQuantizationType.Q4_1)
    mixed = load_model(path, dtype=KVDType.BFLOAT16, eager_phases={PhaseName.DECODE})
    arithmetic = {phase: model.arithmetic for phase, model in mixed.phases.items()}
    assert arithmetic == {PhaseName.PREFILL: "native bfloat16", PhaseName.DECODE: "torch bfloat16"}
    plain = {PhaseName.DECODE: Quantization.NONE}
    assert load_model(path, dtype=KVDType.BFLOAT16, quantizations=plain).phases[PhaseName.DECODE].library is not None
    with pytest.raises(ConfigError, match="--enforce-eager"):
        load_model(
            path, dtype=KVDType.BFLOAT16, quantizations={PhaseName.DECODE: Quantization.INT8}, eager_phases=tuple(PhaseName)
        )


def test_where_all_is_eager_no_kernels_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("nobody asked for them")

    monkeypatch.setattr("llm_engine.load_model.find_library", fail)
    loaded = load_model(write_tiny_gguf(tmp_path / "tiny.gguf"), dtype=KVDType.BFLOAT16, eager_phases=tuple(PhaseName))
    assert loaded.phases[PhaseName.PREFILL] is loaded.phases[PhaseName.DECODE]
    assert loaded.phases[PhaseName.PREFILL].arithmetic == "torch bfloat16"


@pytest.mark.parametrize("quantization", [Quantization.AUTO, Quantization.INT8, Quantization.INT4])
def test_the_forms_of_both_phases_mean_the_same_model(quantization: Quantization, tmp_path: Path) -> None:
    skip_without_kernels()
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type=GGMLQuantizationType.Q4_1)
    engine = TinyEngine(path, KVDType.BFLOAT16, decode=quantization)
    plain = engine.prefill(PROMPT, chunk=16, max_tokens=16).results[-1].logprobs
    native = engine.prefill(PROMPT, chunk=16, max_tokens=16, phase=PhaseName.DECODE).results[-1].logprobs
    assert plain is not None
    assert native is not None
    shared = dict(plain.top).keys() & dict(native.top).keys()
    assert len(shared) >= 16
    assert all(abs(dict(plain.top)[token] - dict(native.top)[token]) < 0.15 for token in shared)


@pytest.mark.parametrize("dtype", [KVDType.FLOAT32, KVDType.BFLOAT16])
def test_progress_rises_to_the_whole(dtype: KVDType, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(
        write_tiny_gguf(tmp_path / "tiny.gguf"),
        dtype=dtype,
        on_progress=lambda num_done, num_all: calls.append((num_done, num_all)),
    )
    done = [num_done for num_done, _ in calls]
    assert done[0] == 0
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1]
    assert {num_all for _, num_all in calls} == {calls[-1][1]}


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight", "blk.0.ffn_norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", omit=frozenset({name}))
    with pytest.raises(ModelFileError, match=f"lacks the tensor {name}"):
        load_model(path, dtype=KVDType.FLOAT32)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    name = "blk.1.attn_k.weight"
    wrong = np.zeros((64, 64), dtype=np.float32)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", omit=frozenset({name}), extra_tensors={name: wrong})
    with pytest.raises(ModelFileError, match=r"blk\.1\.attn_k\.weight has shape \[64, 64\]; .* \[32, 64\]"):
        load_model(path, dtype=KVDType.FLOAT32)


def test_a_tensor_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", extra_tensors={"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)})
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q\.bias"):
        load_model(path, dtype=KVDType.FLOAT32)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(ModelFileError, match="architecture 'mamba'; supported are 'llama', 'smollm3', 'qwen2'"):
        read_model_config(path)


@pytest.mark.parametrize(
    "weight_type",
    [GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1],
)
def test_quantised_weights_answer_much_like_the_originals(weight_type: GGMLQuantizationType, tmp_path: Path) -> None:
    def logprobs(path: Path) -> dict[int, float]:
        engine = TinyEngine(path, KVDType.FLOAT32)
        token = engine.prefill(PROMPT, chunk=16, max_tokens=16).results[-1]
        assert token.logprobs is not None
        return dict(token.logprobs.top)

    original = logprobs(write_tiny_gguf(tmp_path / "f32.gguf"))
    quantised = logprobs(write_tiny_gguf(tmp_path / "quantised.gguf", weight_type=weight_type))
    shared = original.keys() & quantised.keys()
    assert len(shared) >= 12
    is_coarse = weight_type is GGMLQuantizationType.Q4_1
    assert all(abs(original[token] - quantised[token]) < (1.5 if is_coarse else 0.3) for token in shared)


def test_rope_factors_are_applied(tmp_path: Path) -> None:
    def stored_keys(path: Path) -> torch.Tensor:
        engine = TinyEngine(path, KVDType.FLOAT32)
        return engine.stored(engine.prefill(PROMPT, chunk=16, max_tokens=16))[0, 0, 0]  # [page_size, num_kv_heads, head_dim]

    def with_factor(factor: float) -> Path:
        factors = {"rope_freqs.weight": np.full(8, factor, dtype=np.float32)}
        return write_tiny_gguf(tmp_path / f"factor-{factor}.gguf", extra_tensors=factors)

    plain = stored_keys(write_tiny_gguf(tmp_path / "tiny.gguf"))
    assert torch.equal(stored_keys(with_factor(1.0)), plain)
    halved = stored_keys(with_factor(2.0))
    assert torch.equal(halved[0], plain[0]), "position 0 is not rotated"
    assert not torch.equal(halved[1], plain[1])


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_factors_that_divide_by_nothing_are_refused(factor: float, tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.array([1.0] * 7 + [factor], dtype=np.float32)}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", extra_tensors=factors)
    with pytest.raises(ModelFileError, match=r"tensor rope_freqs\.weight divides by numbers that are not from 1e-18"):
        read_model_config(path)


def test_a_model_is_loaded_into_each_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_engine.load_model.find_library", lambda: "need a processor with AVX-512 BF16")
    path, plain = write_tiny_gguf(tmp_path / "tiny.gguf"), {PhaseName.PREFILL: Quantization.NONE}
    sizes = {dtype: load_model(path, dtype=dtype, quantizations=plain).weight_bytes for dtype in WEIGHT_DTYPES}
    assert sizes[KVDType.FLOAT32] > sizes[KVDType.BFLOAT16] == sizes[KVDType.FLOAT16]
