from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from llm_engine.checkpoint import StoredModel, StoredTensor
from llm_engine.decoder_tensors import tensor_shapes
from llm_engine.layer_config import LayerConfig, Rope
from llm_engine.model_config import ModelConfig
from llm_engine.weight_form import WeightForm
from serving_core.engine_config import EngineConfig, Quantization
from serving_core.errors import ConfigError
from serving_core.ids import WorkerId
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from twinpool.memory_plan import (
    SERVER_BYTES,
    WorkerMemory,
    check_memory,
    check_warm_prompts,
    describe_memory,
    worker_memory,
)
from twinpool.worker_spec import WorkerSpec

MIB = 2**20
MODEL = ModelConfig(
    layers=(LayerConfig(rope=Rope(theta=10_000.0)),) * 4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    feed_forward_size=1024,
    vocab_size=10_016,
    num_tokens=10_016,
    max_model_len=4096,
    rms_norm_eps=1e-5,
    attention_scale=0.125,
    is_tied=True,
)
STORED = StoredModel(
    config=MODEL,
    tensors={
        name: StoredTensor(name=name, shape=shape, num_bytes=0, form=WeightForm.INT4, exact_form=WeightForm.INT4)
        for name, shape in tensor_shapes(MODEL).items()
    },
)
PAGE_BYTES = 4 * 2 * 16 * 4 * 64 * 2  # layers, key and value, tokens, heads, their size, bytes of one number


def spec_of(
    phase: PhaseName, *, kv_cache_memory_bytes: int = 512 * MIB, max_num_batched_tokens: int = 512, max_model_len: int = 4096
) -> WorkerSpec:
    engine = EngineConfig(
        dtype=KVDType.BFLOAT16,
        page_size=16,
        max_model_len=max_model_len,
        max_num_seqs=16,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_threads=1,
    )
    return WorkerSpec(
        worker_id=WorkerId(f"{phase.value}-0"),
        phases=frozenset({phase}),
        model_path=Path("model"),
        model_name="model",
        engine=engine,
        router_addresses=(),
    )


PAIR = [spec_of(PhaseName.PREFILL), spec_of(PhaseName.DECODE)]


def memory_of(spec: WorkerSpec) -> WorkerMemory:
    return worker_memory(spec, STORED, has_kernels=True)


def check(specs: list[WorkerSpec], available_bytes: int) -> None:
    check_memory(specs, STORED, available_bytes, has_kernels=True)


def needed_bytes(specs: list[WorkerSpec]) -> int:
    workers = [memory_of(spec) for spec in specs]
    return SERVER_BYTES + sum(worker.fixed_bytes + worker.kv_cache_bytes for worker in workers)


def test_weights_workspace_and_cache_stand_apart() -> None:
    memory = memory_of(PAIR[0])
    matrices, norms = 10_016 * 512 + 4 * (2 * 512 * 512 + 2 * 256 * 512 + 3 * 512 * 1024), 512 + 4 * 2 * 512
    assert memory.weight_bytes == 2 * matrices + 4 * norms
    assert memory.kv_cache_bytes == 512 * MIB
    assert memory.min_kv_cache_bytes == 256 * PAGE_BYTES
    larger_cache = memory_of(spec_of(PhaseName.PREFILL, kv_cache_memory_bytes=600 * MIB))
    assert larger_cache.workspace_bytes == memory.workspace_bytes > 0


def test_each_worker_holds_the_forms_of_its_phases() -> None:
    prefill, decode = (memory_of(spec).weight_bytes for spec in PAIR)
    both = dataclasses.replace(PAIR[0], phases=frozenset(PhaseName))
    assert 0.25 * prefill < decode < 0.45 * prefill
    assert memory_of(both).weight_bytes == prefill + decode
    alike = dataclasses.replace(both, engine=dataclasses.replace(both.engine, decode_quantization=Quantization.NONE))
    assert memory_of(alike).weight_bytes == prefill
    assert worker_memory(PAIR[1], STORED, has_kernels=False).weight_bytes == prefill, "torch computes"


def test_int8_takes_little_more_than_half() -> None:
    def memory_in(cache_dtype: KVDType) -> WorkerMemory:
        return memory_of(dataclasses.replace(PAIR[0], engine=dataclasses.replace(PAIR[0].engine, kv_cache_dtype=cache_dtype)))

    bfloat16, int8 = memory_in(KVDType.BFLOAT16), memory_in(KVDType.INT8)
    assert bfloat16 == memory_of(PAIR[0])
    assert int8.weight_bytes == bfloat16.weight_bytes
    page_bytes = PAGE_BYTES // 2 + PAGE_BYTES // 2 // 64 * 4  # a scale for 64 numbers
    assert int8.min_kv_cache_bytes == 256 * page_bytes
    assert int8.kv_cache_bytes == 512 * MIB // page_bytes * page_bytes
    assert int8.workspace_bytes == bfloat16.workspace_bytes, "the kernels pack either as bfloat16"
    assert "of int8" in describe_memory(int8)


def test_eager_phases_hold_plain_weights_once() -> None:
    both = dataclasses.replace(PAIR[0], phases=frozenset(PhaseName))
    plain = worker_memory(PAIR[0], STORED, has_kernels=False).weight_bytes

    def bytes_with(*eager: PhaseName, has_kernels: bool = True) -> int:
        spec = dataclasses.replace(both, engine=dataclasses.replace(both.engine, eager_phases=frozenset(eager)))
        return worker_memory(spec, STORED, has_kernels=has_kernels).weight_bytes

    assert bytes_with(*PhaseName) == plain
    assert bytes_with(PhaseName.DECODE) == plain + memory_of(PAIR[0]).weight_bytes
    assert bytes_with(PhaseName.PREFILL) == plain + memory_of(PAIR[1]).weight_bytes
    assert bytes_with(PhaseName.PREFILL, has_kernels=False) == plain, "both are plain, and share"


@pytest.mark.parametrize("change", [{"max_num_batched_tokens": 1024}, {"max_model_len": 2048}])
def test_the_workspace_follows_from_the_step(change: dict[str, int]) -> None:
    before = memory_of(PAIR[0]).workspace_bytes
    after = memory_of(spec_of(PhaseName.PREFILL, **change)).workspace_bytes
    assert (after > before) == ("max_num_batched_tokens" in change)
    assert after != before


def test_each_prompt_of_a_step_adds_to_the_workspace_however_short_it_is() -> None:
    engine = PAIR[0].engine
    more_rows, whole_pages = dataclasses.replace(engine, max_num_seqs=64), dataclasses.replace(engine, page_size=512)
    few, many, large_pages = (
        memory_of(dataclasses.replace(PAIR[0], engine=changed)).workspace_bytes for changed in (engine, more_rows, whole_pages)
    )
    key_bytes = 2 * 4 * 64 * 2  # key and value, heads, their size, bytes of one number
    assert many - few >= 48 * 512 * key_bytes
    assert large_pages == few


def test_a_worker_with_both_phases_has_the_larger_workspace() -> None:
    both = dataclasses.replace(PAIR[0], phases=frozenset(PhaseName))
    assert memory_of(both).workspace_bytes == max(memory_of(spec).workspace_bytes for spec in PAIR)


@pytest.mark.parametrize("page_size", [8, 16, 48])
def test_a_cache_is_whole_pages_of_the_workers_own_size(page_size: int) -> None:
    worker = memory_of(dataclasses.replace(PAIR[1], engine=dataclasses.replace(PAIR[1].engine, page_size=page_size)))
    page_bytes = PAGE_BYTES // 16 * page_size
    assert worker.kv_cache_bytes == 512 * MIB // page_bytes * page_bytes
    assert worker.min_kv_cache_bytes == -(-4096 // page_size) * page_bytes


def test_what_fits_is_not_refused() -> None:
    check(PAIR, needed_bytes(PAIR))


def test_a_cache_beyond_the_machine_names_the_one_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"of memory and this machine has .* left \(prefill-0: weights .*decode-0") as caught:
        check(PAIR, needed_bytes(PAIR) - 1)
    fitting = int(str(caught.value).rpartition("at most ")[2].removesuffix("MiB"))
    assert fitting == 511
    smaller = [spec_of(phase, kv_cache_memory_bytes=fitting * MIB) for phase in (PhaseName.PREFILL, PhaseName.DECODE)]
    check(smaller, needed_bytes(PAIR) - 1)


def test_a_window_that_does_not_fit_either_is_named_too() -> None:
    fixed = needed_bytes(PAIR) - 2 * 512 * MIB
    with pytest.raises(ConfigError, match=r"at most 10MiB and --max-model-len of at most 2560"):
        check(PAIR, fixed + 2 * 10 * MIB)


def test_a_machine_too_small_for_the_weights_is_named() -> None:
    with pytest.raises(ConfigError, match="no KV cache is small enough for that; give fewer workers or a smaller model"):
        check(PAIR, needed_bytes(PAIR) - 2 * 512 * MIB)


def test_warm_prompts_fit_into_the_cache_together() -> None:
    small = [spec_of(phase, kv_cache_memory_bytes=4 * PAGE_BYTES, max_model_len=64) for phase in PhaseName]
    shared = tuple(range(32))  # two pages
    one, other = (*shared, *range(16), 7), (*shared, *range(1, 17), 7)
    check_warm_prompts(small, MODEL, [shared, one, other])
    check_warm_prompts(small, MODEL, [])
    with pytest.raises(
        ConfigError,
        match=r"^the warm prompts take 5 pages of 16 tokens together, and the KV cache of prefill-0 has 4: "
        "give --kv-cache-memory-bytes of more than 1MiB, or fewer",
    ):
        check_warm_prompts(small, MODEL, [one, other, tuple(range(2, 18))])
    # who keeps nothing need not hold them
    engines = [dataclasses.replace(spec.engine, has_prefix_cache=False) for spec in small]
    forgetful = [dataclasses.replace(spec, engine=engine) for spec, engine in zip(small, engines, strict=True)]
    check_warm_prompts(forgetful, MODEL, [one, other, tuple(range(2, 18))])
