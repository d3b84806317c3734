"""``--config FILE.yaml``: the same names as the flags, and the command line wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool import serve_command
from twinpool.cli import main
from twinpool.serve_config import ServeConfig, make_serve_config


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """What ``twinpool serve`` would have served."""
    configs: list[ServeConfig] = []

    def record(flags: object) -> int:
        configs.append(make_serve_config(flags))  # type: ignore[arg-type]
        return 0

    monkeypatch.setattr(serve_command, "serve_command", record)
    return configs


def serve(path: Path, text: str, *argv: str) -> object:
    file = path / "twinpool.yaml"
    file.write_text(text)
    try:
        return main(["serve", "--config", str(file), *argv])
    except SystemExit as exit_:
        return exit_.code


def test_the_command_line_wins(tmp_path: Path, served: list[ServeConfig]) -> None:
    text = "port: 9000\nprefill-workers: 2\napi-key: secret\nkv-cache-memory-bytes: 64MiB\nlease-seconds: 2.5\n"
    assert serve(tmp_path, text, "--port", "9001", "--decode-workers=3") == 0
    (config,) = served
    assert (config.port, config.num_prefill_workers, config.num_decode_workers) == (9001, 2, 3)
    assert (config.api_key, config.lease_s) == ("secret", 2.5)
    assert config.prefill.kv_cache_memory_bytes == 64 * 2**20


def test_switches_and_nothing(tmp_path: Path, served: list[ServeConfig]) -> None:
    for text in ("colocated: true", "colocated: false", "colocated:\nport: null", "", "# nothing"):
        assert serve(tmp_path, text) == 0
    assert [config.is_colocated for config in served] == [True, False, False, False, False]


def test_a_switch_that_is_false_is_its_opposite_where_there_is_one(tmp_path: Path, served: list[ServeConfig]) -> None:
    for text in (
        "enable-prefix-caching: false",
        "no-enable-prefix-caching: true",
        "prefill-enable-prefix-caching: false",
        "no-enable-prefix-caching: false",
        "enable-prefix-caching: true",
    ):
        assert serve(tmp_path, text) == 0
    assert serve(tmp_path, "enable-prefix-caching: false", "--enable-prefix-caching") == 0
    on = [(config.prefill.enable_prefix_caching, config.decode.enable_prefix_caching) for config in served]
    assert on == [(False, False), (False, False), (False, True), (True, True), (True, True), (True, True)]
    assert serve(tmp_path, "decode-async-scheduling: false") == 0
    assert (served[-1].prefill.async_scheduling, served[-1].decode.async_scheduling) == (True, False)


def test_the_model(tmp_path: Path, served: list[ServeConfig]) -> None:
    model = tmp_path / "mine.gguf"
    model.touch()
    assert serve(tmp_path, f"model: {model}") == 0
    assert serve(tmp_path, "model: nowhere", str(model)) == 0
    assert serve(tmp_path, f"model: {model}", "smollm2-135m-instruct") == 0
    assert [config.model.name for config in served] == ["mine", "mine", "smollm2-135m-instruct"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefil-workers: 2", ["unknown flag --prefil-workers in ", "twinpool.yaml", "the nearest is --prefill-workers\n"]),
        ("block_size: 16", ["unknown flag --block_size", "the nearest is --block-size\n"]),
        ("--port: 1", ["the nearest is --port\n"]),
        ("help: true", ["unknown flag --help"]),
        ("config: other.yaml", ["unknown flag --config"]),
        ("1: 2", ["unknown flag --1"]),
        ("port: http", ["--port", "'http'"]),
        ("port: 70000", ["--port is 70000"]),
        ("port: [1, 2]", ["port in ", "list", "one text or number"]),
        ("host: true", ["host in ", "one text or number"]),
        ("colocated: 1", ["colocated in ", "true or false"]),
        ("model: {a: b}", ["model in ", "mapping"]),
        ("- port", ["must hold flags", "list"]),
        ("port: 1: 2", ["not valid YAML", "line 1"]),
        ("threads: " + "9" * 5000, ["not valid YAML", "digits"]),
        ("threads: 0x" + "f" * 5000, ["threads in ", "too many digits"]),
        ("[" * 5000, ["not valid YAML"]),
        ("port: !!bool maybe", ["not valid YAML"]),
        ("dtype: int8", ["--dtype", "int8"]),
        ("port: 1\ncolocated: true\ndecode-workers: 2", ["--colocated", "--decode-workers"]),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    tmp_path: Path, served: list[ServeConfig], capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    assert serve(tmp_path, text) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    for word in words:
        assert word in error
    assert served == []


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml cannot be read: No such file" in capsys.readouterr().err
    assert main(["serve", "--config", str(tmp_path)]) == 2
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    assert main(["serve", "--config", str(tmp_path / "binary.yaml")]) == 2


def test_a_flag_that_may_be_repeated_takes_a_list_and_adds_up(tmp_path: Path, served: list[ServeConfig]) -> None:
    for text, argv in (
        ("warm-prompt: a.txt", ()),
        ("warm-prompt: [a.txt, b.json]", ()),
        ("warm-prompt:\n- a.txt", ("--warm-prompt", "c.txt")),
        ("warm-prompt: []", ()),
    ):
        assert serve(tmp_path, text, *argv) == 0
    assert [[path.name for path in config.warm_prompts] for config in served] == [
        ["a.txt"],
        ["a.txt", "b.json"],
        ["a.txt", "c.txt"],
        [],
    ]


def test_no_other_flag_takes_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str], served: list[ServeConfig]) -> None:
    for text in ("port: [1, 2]", "warm-prompt: [[a.txt]]", "warm-prompt: [{a: b}]"):
        assert serve(tmp_path, text) == 2
        assert "must be one text or number" in capsys.readouterr().err
    assert not served
