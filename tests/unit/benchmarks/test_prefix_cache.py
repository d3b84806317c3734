from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.prefix_cache import (
    BLOCK_TOKENS,
    TRACE,
    WITH,
    WITHOUT,
    Answer,
    TracedRequest,
    Turn,
    best_hit_rate,
    draw,
    make_report,
    read_trace,
    spread_ticks,
)

DEFAULT_WINDOW = 8192


def request_of(*token_ids: int) -> TracedRequest:
    return TracedRequest(send_at_s=1.0, prompt=token_ids, num_answer_tokens=1)


def turn(arm: str, first_token_s: float, *, num_cached: int, text: str = "same") -> Turn:
    answer = Answer(first_token_s=first_token_s, num_prompt=100, num_cached=num_cached, text=text)
    return Turn(arm=arm, answers=(answer, None), num_kv_bytes=4e6)


def test_a_trace_is_scaled_in_length_and_time(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 33, "hash_ids": [0, 7]},
        {"timestamp": 0, "input_length": 520, "output_length": 1, "hash_ids": [0, 8]},
        {"timestamp": 6000, "input_length": 1536, "output_length": 16, "hash_ids": [0, 7, 9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = read_trace(path, rate=0.5)
    assert [request.send_at_s for request in (first, second, third)] == [0.0, pytest.approx(1.0), pytest.approx(4.0)]
    assert [len(request.prompt) for request in (first, second, third)] == [63, 33, 96]
    assert [request.num_answer_tokens for request in (first, second, third)] == [3, 1, 1]
    assert third.prompt[:63] == first.prompt
    assert second.prompt[:BLOCK_TOKENS] == first.prompt[:BLOCK_TOKENS]
    assert second.prompt[BLOCK_TOKENS] != first.prompt[BLOCK_TOKENS]
    assert len(read_trace(path, rate=0.5, num_requests=2)) == 2


def test_times_of_a_tick_are_spread_over_it() -> None:
    assert spread_ticks([0, 0, 0, 3000, 9000, 9000]) == [0, 1000, 2000, 3000, 9000, 10500]


def test_what_a_cache_could_hit() -> None:
    text = tuple(range(40))
    assert best_hit_rate([request_of(*text), request_of(*text[:32]), request_of(*text, 1)]) == (16 + 32) / (40 + 32 + 41)


def test_the_trace_fits_the_default_model() -> None:
    requests = read_trace(TRACE, rate=0.4)
    assert all(len(request.prompt) + request.num_answer_tokens <= DEFAULT_WINDOW for request in requests)
    assert 0.2 < best_hit_rate(requests) < 0.6


def test_the_report_and_the_plot(tmp_path: Path) -> None:
    turns = [
        turn(WITHOUT, 2.0, num_cached=0),
        turn(WITH, 1.0, num_cached=40),
        turn(WITH, 1.0, num_cached=30),
        turn(WITHOUT, 4.0, num_cached=0),
    ]
    report = make_report(turns, [request_of(1, 2), request_of(3)], ["commit: abc"])
    assert "- commit: abc\n" in report
    assert "| prompt tokens from prefill's cache, % | 0.0 (0.0-0.0) | 35.0 (30.0-40.0) | - |" in report
    assert "| first token p50, s | 3.00 (2.00-4.00) | 1.00 (1.00-1.00) | 0.38 (0.25-0.50) |" in report
    assert "| requests that failed | 1 (1-1) | 1 (1-1) | 1.00 (1.00-1.00) |" in report
    assert "Every answer was the same" in report
    turns[1] = turn(WITH, 1.0, num_cached=40, text="other")
    assert "1 of 2 answers were not the same" in make_report(turns, [request_of(1, 2), request_of(3)], [])
    pytest.importorskip("matplotlib")
    draw(turns, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
