import os
import sys
from pathlib import Path

import pytest

from benchmarks.engines.flags import parse_flags


def test_defaults() -> None:
    flags = parse_flags([])
    assert flags.rounds == 3
    assert flags.batches == (1, 4, 8, 16, 32)
    assert flags.lengths == (128, 256, 512, 1024, 2048, 4096)
    assert flags.threads == len(os.sched_getaffinity(0))
    assert flags.llama_cpp_python is None
    assert flags.has_transformers


def test_sizes_are_sorted_and_may_be_none() -> None:
    flags = parse_flags(["--batches", "8, 1,8", "--contexts", ""])
    assert flags.batches == (1, 8)
    assert flags.contexts == ()


def test_an_interpreter_stays_the_link_that_it_is(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert parse_flags(["--vllm-python", str(link)]).vllm_python == link


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batches", "1,x"], "'x' is not a whole number from 1 on"),
        (["--rounds", "0"], "'0' is not a whole number from 1 on"),
        (["--threads", "4096"], "--threads is 4096, but this process may use"),
        (["--llama-cpp-python", "/nowhere/python"], "/nowhere/python is not a program"),
    ],
)
def test_what_cannot_be(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(words)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
