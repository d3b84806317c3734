from __future__ import annotations

import pytest

from llm_engine.memory_budget import StepSize, check_step_budget, num_pages_for_budget
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType, KVPageLayout

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


def test_a_decode_step_holds_a_replayed_log_beside_the_others_tokens() -> None:
    step = StepSize.of_decode(max_num_seqs=4, max_replay_tokens=16, max_model_len=512, page_size=16, num_pages=100)
    assert (step.num_rows, step.num_tokens, step.max_row_tokens) == (4, 3 + 16, 16)


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
