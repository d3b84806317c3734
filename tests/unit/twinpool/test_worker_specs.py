from __future__ import annotations

import pytest

from llm_engine.open_checkpoint import read_model_config
from serving_core.engine_config import Quantization
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from twinpool.cli import make_parser
from twinpool.serve_config import make_serve_config
from twinpool.worker_spec import WorkerSpec
from twinpool.worker_specs import make_worker_specs, plan_server_cores


def specs_of(*argv: str, num_cores: int = 2) -> dict[str, WorkerSpec]:
    config = make_serve_config(make_parser().parse_args(["serve", *argv]))
    cores = plan_server_cores(config, range(num_cores))
    specs = make_worker_specs(config, read_model_config(config.model.path), cores, ("127.0.0.1:7",))
    return {spec.worker_id: spec for spec in specs}


def test_the_default_is_a_pair() -> None:
    specs = specs_of()
    assert set(specs) == {"prefill-0", "decode-0"}
    prefill, decode = specs["prefill-0"], specs["decode-0"]
    assert (prefill.phases, decode.phases) == (frozenset({PhaseName.PREFILL}), frozenset({PhaseName.DECODE}))
    assert prefill.router_addresses == decode.router_addresses == ("127.0.0.1:7",)
    assert prefill.engine.max_model_len == decode.engine.max_model_len == 8192
    assert (prefill.engine.cpu_cores, decode.engine.cpu_cores) == ((0,), (1,))
    assert (prefill.engine.niceness, decode.engine.niceness) == (10, 0)


def test_one_core_pins_nothing_but_keeps_prefill_behind() -> None:
    specs = specs_of(num_cores=1)
    assert [spec.engine.cpu_cores for spec in specs.values()] == [(), ()]
    assert specs["prefill-0"].engine.niceness == 10


def test_pools_of_several() -> None:
    specs = specs_of("--prefill-workers", "2", "--decode-workers", "3", "--threads", "1", num_cores=8)
    assert list(specs) == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert [specs[f"decode-{i}"].engine.cpu_cores for i in range(3)] == [(5,), (6,), (7,)]
    assert specs["prefill-0"].engine == specs["prefill-1"].engine
    assert specs["prefill-0"].engine.cpu_cores == (0, 1, 2, 3, 4)


def test_colocated_takes_each_phases_own_budget() -> None:
    (spec,) = specs_of("--colocated", "--prefill-max-num-batched-tokens", "99", "--decode-max-num-seqs", "7").values()
    assert spec.worker_id == "colocated-0"
    assert spec.phases == frozenset(PhaseName)
    assert (spec.engine.max_num_batched_tokens, spec.engine.max_num_seqs) == (99, 7)
    assert (spec.engine.cpu_cores, spec.engine.niceness) == ((1,), 0)


def test_the_worker_chooses_the_page_size_that_nobody_gave() -> None:
    for engine in (spec.engine for spec in specs_of().values()):
        assert engine.page_size is None
        assert engine.planned_page_size == 16
    for engine in (spec.engine for spec in specs_of("--block-size", "256").values()):
        assert engine.page_size == engine.planned_page_size == 256


@pytest.mark.parametrize(("num_gpus", "dtype"), [(0, KVDType.FLOAT32), (1, KVDType.BFLOAT16)])
def test_a_gpu_computes_bfloat16_whatever_the_processor_does(
    num_gpus: int, dtype: KVDType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinpool.engine_flags.has_bfloat16", lambda: False)
    monkeypatch.setattr("twinpool.serve_config.num_local_gpus", lambda: num_gpus)
    assert {spec.engine.dtype for spec in specs_of().values()} == {dtype}


@pytest.mark.parametrize("argv", [(), ("--colocated",), ("--dtype", "float32")])
def test_forms_that_only_processors_compute_are_refused_on_gpus(argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.serve_config.num_local_gpus", lambda: 1)
    assert specs_of(*argv)
    with pytest.raises(
        ConfigError,
        match=r"^--quantization is int8, which only CPUs compute, and this worker has a GPU; give --quantization none",
    ):
        specs_of(*argv, "--quantization", "int8")


def test_every_worker_knows_the_type_of_its_pages() -> None:
    for spec in specs_of("--dtype", "bfloat16", "--kv-cache-dtype", "int8").values():
        assert spec.engine.page_dtype is KVDType.INT8
    for spec in specs_of("--dtype", "bfloat16").values():
        assert spec.engine.page_dtype is KVDType.BFLOAT16


def test_a_budget_holds_nearly_twice_the_window_in_int8() -> None:
    argv = ("--dtype", "bfloat16", "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes")
    budget = str(30 * 2 * 3 * (64 + 4) * 8192)  # layers, key and value, heads, numbers and a scale of each, tokens
    assert specs_of(*argv, budget, "--kv-cache-dtype", "int8")
    with pytest.raises(
        ConfigError, match=rf"--kv-cache-memory-bytes is {budget}, too small .* at least {30 * 2 * 3 * 128 * 8192}"
    ):
        specs_of(*argv, budget)
    with pytest.raises(ConfigError, match=f"at least {budget}, or lower --max-model-len to 8176"):
        specs_of(*argv, str(int(budget) - 1), "--kv-cache-dtype", "int8")


def test_every_worker_knows_which_phases_are_eager() -> None:
    assert [spec.engine.eager_phases for spec in specs_of().values()] == [frozenset(), frozenset()]
    for argv in ((), ("--colocated",)):
        for spec in specs_of(*argv, "--dtype", "bfloat16", "--prefill-enforce-eager").values():
            assert (spec.engine.is_eager(PhaseName.PREFILL), spec.engine.is_eager(PhaseName.DECODE)) == (True, False)


def test_every_worker_knows_the_form_of_each_phase() -> None:
    for argv in ((), ("--colocated",)):
        for spec in specs_of(*argv, "--dtype", "bfloat16", "--decode-quantization", "int8").values():
            assert spec.engine.quantization(PhaseName.PREFILL) is Quantization.NONE
            assert spec.engine.quantization(PhaseName.DECODE) is Quantization.INT8


def test_flags_reach_the_phase_they_name() -> None:
    specs = specs_of("--served-model-name", "mine", "--decode-kv-cache-memory-bytes", "2G", "--lease-seconds", "9")
    assert specs["decode-0"].engine.kv_cache_memory_bytes == 2 * 2**30
    assert specs["prefill-0"].engine.kv_cache_memory_bytes == 2**30
    assert {spec.engine.lease_s for spec in specs.values()} == {9.0}
    assert {spec.model_name for spec in specs.values()} == {"mine"}


def test_each_worker_knows_whether_it_keeps_prefixes() -> None:
    assert [spec.engine.has_prefix_cache for spec in specs_of().values()] == [True, True]
    specs = specs_of("--prefill-no-enable-prefix-caching")
    assert [specs[name].engine.has_prefix_cache for name in ("prefill-0", "decode-0")] == [False, True]
    assert not specs_of("--colocated", "--no-enable-prefix-caching")["colocated-0"].engine.has_prefix_cache


def test_each_worker_knows_whether_its_steps_run_ahead() -> None:
    assert specs_of()["decode-0"].engine.has_async_scheduling
    assert not specs_of("--no-async-scheduling")["decode-0"].engine.has_async_scheduling


def test_each_phase_has_pages_of_its_own_size() -> None:
    specs = specs_of("--prefill-block-size", "16", "--decode-block-size", "32")
    assert [specs[name].engine.page_size for name in ("prefill-0", "decode-0")] == [16, 32]


def test_what_the_model_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="8192"):
        specs_of("--max-model-len", "9000")
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        specs_of("--prefill-kv-cache-memory-bytes", "1M")
