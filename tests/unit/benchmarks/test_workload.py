from dataclasses import replace
from pathlib import Path

from benchmarks.engines.workload import Workload, num_prefill_runs

WORKLOAD = Workload(
    model_path="model.gguf",
    folder_path="folder",
    num_threads=2,
    text=(5, 6, 7),
    lengths=(128, 512),
    batches=(1, 32),
    context=256,
    num_steps=64,
    contexts=(256, 4096),
    num_context_steps=16,
)


def test_written_and_read(tmp_path: Path) -> None:
    WORKLOAD.write(tmp_path / "workload.json")
    assert Workload.read(tmp_path / "workload.json") == WORKLOAD


def test_the_text_starts_again() -> None:
    assert WORKLOAD.prompt(5) == [5, 6, 7, 5, 6]


def test_room() -> None:
    assert WORKLOAD.max_sequence_tokens == 4096 + 16
    assert WORKLOAD.max_total_tokens == 8 * (4096 + 16)
    assert replace(WORKLOAD, contexts=()).max_total_tokens == 32 * (256 + 64)
    assert WORKLOAD.max_sequences == 32
    smallest = replace(WORKLOAD, contexts=(), batches=(), lengths=(9,))
    assert (smallest.max_sequences, smallest.max_total_tokens) == (1, 256 + 32), "the tokens to compare"


def test_short_prompts_are_computed_more_often() -> None:
    assert [num_prefill_runs(length) for length in (1, 128, 512, 1024, 2048, 4096)] == [4, 4, 4, 2, 1, 1]
