from __future__ import annotations

from dataclasses import replace

import pytest

from llm_engine.memory_budget import StepSize, check_step_budget, num_pages_for_budget, workspace_bytes
from serving_core.engine_config import MAX_KV_CACHE_BYTES, MAX_MODEL_LEN
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.worker_status import PhaseName
from tests.unit.llm_engine.tiny_config import TINY_CONFIG

LAYOUT = KVPageLayout(num_layers=2, num_kv_heads=2, head_dim=16, page_size=16, dtype=KVDType.BFLOAT16)


def test_as_many_whole_pages_as_fit() -> None:
    budget = 10 * LAYOUT.page_bytes
    assert num_pages_for_budget(LAYOUT, budget, 160) == 10
    assert num_pages_for_budget(LAYOUT, budget + LAYOUT.page_bytes - 1, 160) == 10


def test_a_budget_below_one_window_names_both_ways_out() -> None:
    with pytest.raises(ConfigError) as caught:
        num_pages_for_budget(LAYOUT, 10 * LAYOUT.page_bytes, 161)
    assert str(11 * LAYOUT.page_bytes) in str(caught.value)
    assert "--max-model-len to 160" in str(caught.value)
    assert num_pages_for_budget(LAYOUT, 11 * LAYOUT.page_bytes, 161) == 11


def test_a_budget_below_one_page_proposes_no_shorter_window() -> None:
    with pytest.raises(ConfigError) as caught:
        num_pages_for_budget(LAYOUT, LAYOUT.page_bytes - 1, 16)
    assert str(LAYOUT.page_bytes) in str(caught.value)
    assert "--max-model-len" not in str(caught.value)


def test_no_way_out_is_named_that_would_be_refused() -> None:
    def refusal(budget: int, max_model_len: int, layout: KVPageLayout = LAYOUT) -> str:
        with pytest.raises(ConfigError) as caught:
            num_pages_for_budget(layout, budget, max_model_len)
        return str(caught.value)

    max_tokens = MAX_KV_CACHE_BYTES // LAYOUT.page_bytes * LAYOUT.page_size
    assert f"give at least {MAX_KV_CACHE_BYTES}, or lower --max-model-len to 160." in refusal(
        10 * LAYOUT.page_bytes, max_tokens
    )
    assert refusal(10 * LAYOUT.page_bytes, max_tokens + 1).endswith("; lower --max-model-len to 160.")
    assert refusal(MAX_KV_CACHE_BYTES, max_tokens + 1).endswith(f"; lower --max-model-len to {MAX_MODEL_LEN}.")
    assert refusal(1, max_tokens + 1).endswith("; give more, and lower --max-model-len.")
    single = replace(LAYOUT, page_size=1)
    assert refusal(single.page_bytes, 5, single).endswith(f"; give at least {5 * single.page_bytes}."), "one token is no window"


def test_a_decode_step_holds_a_replayed_log_beside_the_others_tokens() -> None:
    step = StepSize.of_decode(max_num_seqs=4, max_replay_tokens=16, max_model_len=512, page_size=16, num_pages=100)
    assert (step.num_rows, step.num_tokens, step.max_row_tokens) == (4, 3 + 16, 16)


def bytes_of(
    phase: PhaseName, step: StepSize, *, head_dim: int = 64, cache: KVDType = KVDType.BFLOAT16, is_native: bool
) -> int:
    config = replace(TINY_CONFIG, head_dim=head_dim)
    return workspace_bytes(config, phase, KVDType.BFLOAT16, step, cache_dtype=cache, is_native=is_native)


def test_the_native_kernels_make_no_mask() -> None:
    step = StepSize(num_tokens=512, max_row_tokens=512, num_rows=1, num_keys=131_072, max_row_keys=131_072)
    masks = step.num_tokens * step.max_row_keys * TINY_CONFIG.num_heads // TINY_CONFIG.num_kv_heads * 4
    assert bytes_of(PhaseName.PREFILL, step, is_native=False) > masks
    assert bytes_of(PhaseName.PREFILL, step, is_native=True) < masks / 4


def test_prefill_packs_keys_and_values_padded_and_as_bfloat16() -> None:
    step = StepSize(num_tokens=1, max_row_tokens=1, num_rows=1, num_keys=4096, max_row_keys=4096)
    packed = 4096 * TINY_CONFIG.num_kv_heads * 2 * 32 * 2
    for head_dim in (16, 32):
        alone = bytes_of(PhaseName.PREFILL, replace(step, num_keys=0), head_dim=head_dim, is_native=True)
        for cache in (KVDType.BFLOAT16, KVDType.INT8):
            in_all = bytes_of(PhaseName.PREFILL, step, head_dim=head_dim, cache=cache, is_native=True)
            assert in_all - alone == packed


def test_torch_gathers_and_converts_what_is_of_another_type() -> None:
    step = StepSize(num_tokens=1, max_row_tokens=1, num_rows=1, num_keys=4096, max_row_keys=4096)
    plain, int8 = (bytes_of(PhaseName.DECODE, step, cache=cache, is_native=False) for cache in (KVDType.BFLOAT16, KVDType.INT8))
    assert int8 - plain == 4096 * TINY_CONFIG.num_kv_heads * 64 * (1 + 4)


def test_native_decode_gathers_nothing_but_holds_partial_results() -> None:
    step = StepSize(num_tokens=8, max_row_tokens=1, num_rows=8, num_keys=8 * 4096, max_row_keys=4096)
    alone = bytes_of(PhaseName.DECODE, replace(step, num_keys=0), is_native=True)
    assert bytes_of(PhaseName.DECODE, step, is_native=True) - alone == 8 * 16 * TINY_CONFIG.num_heads * (16 + 64) * 4


def test_a_step_budget_that_suits_window_and_cache_passes() -> None:
    for max_num_batched_tokens in (8, 512, 10_000):
        check_step_budget(max_num_batched_tokens, max_model_len=8192, num_cache_tokens=10_000)
    check_step_budget(512, max_model_len=64, num_cache_tokens=64)  # the default is left alone by a small cache


def test_a_step_budget_too_small_for_the_window_names_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens is 1, .* 8192, would take 8192 steps; give at least 8\."):
        check_step_budget(1, max_model_len=8192, num_cache_tokens=10_000)


def test_a_step_budget_beyond_the_cache_names_the_largest() -> None:
    with pytest.raises(ConfigError, match=r"holds 10000 tokens in all; give at most 10000, or a larger cache"):
        check_step_budget(10_001, max_model_len=8192, num_cache_tokens=10_000)
