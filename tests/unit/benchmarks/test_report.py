"""Ratios and tables, from figures that are easy to follow in the head."""

import pytest

from benchmarks.engines.figures import Figures, Timing
from benchmarks.engines.report import make_report
from benchmarks.engines.run import ModelSize, Run, Turn
from benchmarks.engines.speed_limits import SpeedLimits
from benchmarks.engines.workload import Workload

WORKLOAD = Workload(
    model_path="some.gguf",
    folder_path="folder",
    num_threads=2,
    text=(1,),
    lengths=(128, 512),
    batches=(1, 4, 8),
    context=256,
    num_steps=1,
    contexts=(256, 4096),
    num_context_steps=1,
)


def _figures(*, decode: float, prefill: float, step_s: tuple[float, ...], token_ids: tuple[int, ...]) -> Figures:
    """Tokens a second at every size, and the step's time at each context."""
    return Figures(
        prefill=tuple(Timing(size=length, seconds=(length / prefill,)) for length in WORKLOAD.lengths),
        decode=tuple(Timing(size=batch, seconds=(batch / decode,)) for batch in WORKLOAD.batches),
        steps=tuple(Timing(size=context, seconds=(own,)) for context, own in zip(WORKLOAD.contexts, step_s, strict=False)),
        token_ids=token_ids,
        peak_memory_bytes=512 * 2**20,
        setup="as it comes",
    )


def _run(num_rounds: int = 3) -> Run:
    """In round r, ours decodes 150 + 30 r tokens a second. vLLM is missing from round 1."""
    turns = []
    for number in range(num_rounds):
        ours = _figures(decode=150 + 30 * number, prefill=700, step_s=(0.02, 0.06), token_ids=(1, 2, 3))
        llama_cpp = _figures(decode=100, prefill=200, step_s=(0.03, 0.09), token_ids=(1, 2, 4))
        vllm = _figures(decode=150, prefill=600, step_s=(), token_ids=(1, 2, 3))
        turns += [Turn(arm="ours", round=number, figures=ours), Turn(arm="llama.cpp", round=number, figures=llama_cpp)]
        turns += [Turn(arm="vLLM-CPU", round=number, figures=vllm)] if number != 1 else []
    return Run(
        command="python -m benchmarks.engines",
        commit="abc1234",
        machine="Some Chip, 2 cores",
        model="some.gguf",
        # 8 x 3840 tokens of 1000 bytes are 30.72 MB, read in 20 ms
        size=ModelSize(flops_per_token=10**9, kv_bytes_per_token=1000),
        arms=("ours", "llama.cpp", "vLLM-CPU"),
        turns=tuple(turns),
        limits=(SpeedLimits(read_bytes_per_s=1.536e9, gemm_flops_per_s=1e12),) * num_rounds,
        notes=("transformers is left out: --no-transformers was given",),
    )


def test_ratios_are_taken_within_a_round_against_the_best_there() -> None:
    ratio = _run().ratio(("llama.cpp", "vLLM-CPU"), lambda figures: figures.decode_tokens_per_s(8))
    assert ratio is not None
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.0, 1.4, 1.8))


def test_limits() -> None:
    share = _run().gemm_share(512)
    cost = _run().context_cost("ours", 256, 4096)
    assert share is not None
    assert cost is not None
    assert share.median == pytest.approx(0.7)
    assert cost.median == pytest.approx(2.0)
    assert _run().context_cost("vLLM-CPU", 256, 4096) is None


def test_tables() -> None:
    lines = make_report(_run(), WORKLOAD).splitlines()
    assert "- commit: abc1234" in lines
    assert "- transformers is left out: --no-transformers was given" in lines
    assert "| batch | ours | llama.cpp | vLLM-CPU | ours / better of llama.cpp and vLLM-CPU | target |" in lines
    assert "| 1 | 180 (150-210) | 100 (100-100) | 150 (150-150) | 1.40 (1.00-1.80) | 1.1x ✓ |" in lines
    assert "| 4 | 180 (150-210) | 100 (100-100) | 150 (150-150) | 1.40 (1.00-1.80) |  |" in lines
    assert "| 8 | 180 (150-210) | 100 (100-100) | 150 (150-150) | 1.40 (1.00-1.80) | 1.5x ✗ |" in lines
    prefill = "700 (700-700) | 200 (200-200) | 600 (600-600) | 3.50 (3.50-3.50) ✓ | 1.17 (1.17-1.17) ✗ | 0.70 (0.70-0.70)"
    assert f"| 128 | {prefill} |" in lines
    assert f"| 512 | {prefill} ✓ |" in lines
    assert "| context | ours | llama.cpp |" in lines
    assert "| 4096 | 60.0 (60.0-60.0) | 90.0 (90.0-90.0) |" in lines
    assert "| growth / time to read its keys and values | 2.00 (2.00-2.00) | 3.00 (3.00-3.00) |" in lines
    assert "| 512 (512-512) | 512 (512-512) | 512 (512-512) |" in lines
    assert lines[-1].endswith("llama.cpp 2 of 3, vLLM-CPU 3 of 3.")


def test_a_trial_says_that_it_is_one() -> None:
    assert "a trial: a result takes at least 3 rounds, and this has 1" in make_report(_run(1), WORKLOAD)
    assert "a trial" not in make_report(_run(3), WORKLOAD)
