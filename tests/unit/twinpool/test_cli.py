"""What the command line accepts, and how it refuses the rest."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_model import write_tiny_gguf
from tests.tiny_model_folder import change_json, write_tiny_folder
from twinpool import serve_command
from twinpool.cli import main, make_parser
from twinpool.serve_config import ServeConfig, make_serve_config
from twinpool.transfer_way import TransferWay


def refusal_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence that ``twinpool *argv`` ends with, with status 2."""
    try:
        status: object = main(argv)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def config_of(*argv: str) -> ServeConfig:
    flags, unknown = make_parser().parse_known_args(["serve", *argv])
    assert not unknown
    return make_serve_config(flags)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--prefil-workers", "--prefill-workers"),
        ("--decode-worker=2", "--decode-workers"),
        ("--max-model-length", "--max-model-len"),
        ("--block_size", "--block-size"),
        ("--colocate", "--colocated"),
    ],
)
def test_unknown_flag_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str], typed: str, meant: str) -> None:
    assert f"the nearest is {meant}\n" in refusal_of(capsys, "serve", typed)


def test_flags_of_later_versions_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --tensor-parallel-size" in refusal_of(capsys, "serve", "--tensor-parallel-size", "1")


def test_a_second_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'b'" in refusal_of(capsys, "serve", "a", "b")


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in refusal_of(capsys)
    assert "invalid choice" in refusal_of(capsys, "serv")


@pytest.mark.parametrize(
    "argv",
    [
        ("--port", "65536"),
        ("--port", "-1"),
        ("--port", "http"),
        ("--prefill-workers", "0"),
        ("--decode-workers", "-2"),
        ("--decode-workers", "100000"),
        ("--lease-seconds", "0"),
        ("--lease-seconds", "nan"),
        ("--lease-seconds", "inf"),
        ("--worker-wait", "-1"),
        ("--block-size", "0"),
        ("--block-size", "1.5"),
        ("--decode-block-size", "1000000000000"),
        ("--max-model-len", "1"),
        ("--max-num-seqs", "0"),
        ("--prefill-max-num-batched-tokens", "0"),
        ("--kv-cache-memory-bytes", "0"),
        ("--kv-cache-memory-bytes", "12 parsecs"),
        ("--threads", "0"),
        ("--dtype", "int8"),
        ("--kv-cache-dtype", "int4"),
        ("--decode-kv-cache-dtype", "float32"),
        ("--quantization", "int2"),
        ("--decode-quantization", "awq"),
        ("--served-model-name", ""),
        ("--api-key", " "),
    ],
)
def test_absurd_values_are_refused_by_name(capsys: pytest.CaptureFixture[str], argv: tuple[str, str]) -> None:
    assert argv[0] in refusal_of(capsys, "serve", *argv)


def test_colocated_goes_with_no_worker_count(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal_of(capsys, "serve", "--colocated", "--decode-workers", "1")
    assert "--colocated" in error
    assert "--decode-workers" in error


def test_an_unknown_transfer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown" in refusal_of(capsys, "serve", "--transfer", "pigeon")


def test_the_fabric_is_trusted_when_that_is_said() -> None:
    assert not config_of().trusts_fabric
    assert config_of("--trust-fabric").trusts_fabric


@pytest.mark.parametrize("way", TransferWay)
def test_every_way_of_pages_can_be_asked_for(way: TransferWay) -> None:
    assert config_of("--transfer", way.value).transfer is way


def test_phases_may_differ_in_the_size_of_their_pages() -> None:
    config = config_of("--prefill-block-size", "16", "--decode-block-size", "32")
    assert (config.prefill.block_size, config.decode.block_size) == (16, 32)


def test_phases_must_agree_on_the_type_of_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal_of(capsys, "serve", "--dtype", "float32", "--decode-dtype", "bfloat16")
    assert "--decode-dtype" in error
    error = refusal_of(capsys, "serve", "--dtype", "bfloat16", "--decode-kv-cache-dtype", "int8")
    assert "--prefill-kv-cache-dtype and --decode-kv-cache-dtype differ, bfloat16 and int8, but keys and values are" in error


def test_the_cache_has_the_type_of_the_weights_or_its_own() -> None:
    def types(*argv: str) -> set[tuple[str, str]]:
        config = config_of(*argv)
        return {(flags.dtype.value, flags.kv_cache_dtype.value) for flags in (config.prefill, config.decode)}

    assert types("--dtype", "float32") == {("float32", "float32")}
    assert types("--dtype", "bfloat16", "--kv-cache-dtype", "auto") == {("bfloat16", "bfloat16")}
    assert types("--dtype", "float32", "--kv-cache-dtype", "int8") == {("float32", "int8")}
    each = ("--prefill-kv-cache-dtype", "float16", "--decode-kv-cache-dtype", "float16")
    assert types("--dtype", "bfloat16", "--kv-cache-dtype", "int8", *each) == {("bfloat16", "float16")}


def test_fp8_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal_of(capsys, "serve", "--kv-cache-dtype", "fp8")
    assert "--kv-cache-dtype is fp8, which is for GPUs, and workers compute on CPUs: give int8" in error
    assert error.count("\n") == 1


def test_colocated_phases_share_all_but_their_step_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("--colocated", "--prefill-max-num-batched-tokens", "64", "--decode-max-num-seqs", "8")
    assert (config.num_prefill_workers, config.num_decode_workers) == (0, 0)
    assert "share one engine" in refusal_of(capsys, "serve", "--colocated", "--prefill-threads", "3")


def test_each_phase_has_a_form_of_the_weights() -> None:
    def quantizations(*argv: str) -> tuple[str, str]:
        config = config_of(*argv)
        return config.prefill.quantization.value, config.decode.quantization.value

    assert quantizations() == ("none", "auto")
    assert quantizations("--quantization", "int8") == ("int8", "int8")
    assert quantizations("--decode-quantization", "int4") == ("none", "int4")
    assert quantizations("--quantization", "none", "--prefill-quantization", "auto", "--colocated") == ("auto", "none")


def test_each_phase_may_be_eager() -> None:
    def eager(*argv: str) -> tuple[bool, bool]:
        config = config_of(*argv)
        return config.prefill.enforce_eager, config.decode.enforce_eager

    assert eager() == (False, False)
    assert eager("--enforce-eager") == (True, True)
    assert eager("--decode-enforce-eager", "--colocated") == (False, True)


def test_each_phase_may_keep_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    def is_on(*argv: str) -> tuple[bool, bool]:
        config = config_of(*argv)
        return config.prefill.enable_prefix_caching, config.decode.enable_prefix_caching

    assert is_on() == (True, True)
    assert is_on("--no-enable-prefix-caching") == (False, False)
    assert is_on("--no-enable-prefix-caching", "--enable-prefix-caching") == (True, True)
    assert is_on("--decode-no-enable-prefix-caching") == (True, False)
    assert is_on("--no-enable-prefix-caching", "--prefill-enable-prefix-caching") == (True, False)
    error = refusal_of(capsys, "serve", "--colocated", "--decode-no-enable-prefix-caching")
    assert "--prefill-enable-prefix-caching and --decode-enable-prefix-caching differ, on and off" in error


def test_steps_ahead_can_be_left_out() -> None:
    assert config_of().decode.async_scheduling
    assert not config_of("--no-async-scheduling").decode.async_scheduling
    assert not config_of("--decode-no-async-scheduling").decode.async_scheduling


def test_an_eager_phase_takes_no_packed_weights(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--dtype", "bfloat16", "--decode-enforce-eager", "--decode-quantization", "int4")
    error = refusal_of(capsys, "serve", "--port", "0", *argv)
    assert "--decode-quantization is int4, which needs the native kernels, which --enforce-eager leaves out" in error
    assert error.count("\n") == 1


def test_a_quantization_against_the_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal_of(capsys, "serve", "--port", "0", "--dtype", "float32", "--decode-quantization", "int4")
    assert "--decode-quantization is int4, which computes in bfloat16, but --dtype is float32" in error
    assert "; give --decode-quantization none." in error


def test_an_override_beats_the_common_flag() -> None:
    config = config_of("--max-num-seqs", "8", "--decode-max-num-seqs", "16", "--kv-cache-memory-bytes", "512MiB")
    assert (config.prefill.max_num_seqs, config.decode.max_num_seqs) == (8, 16)
    assert config.prefill.kv_cache_memory_bytes == config.decode.kv_cache_memory_bytes == 512 * 2**20


def test_defaults_are_a_pair_with_the_default_model() -> None:
    config = config_of()
    assert (config.num_prefill_workers, config.num_decode_workers, config.is_colocated) == (1, 1, False)
    assert config.served_model_name == "smollm2-135m-instruct"
    assert config.model.path.suffix == ".gguf"
    assert config_of("--served-model-name", "mine").served_model_name == "mine"


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gpt-17" in refusal_of(capsys, "serve", "gpt-17")
    assert "is no file" in refusal_of(capsys, "serve", "/nowhere/model.gguf")


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port} is taken" in refusal_of(capsys, "serve", "--port", str(port))


def test_a_token_without_embedding_is_no_obstacle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    picture = {**tokenizer["added_tokens"][0], "id": 267, "content": "<picture>"}
    change_json(folder / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], picture])
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the last thing that is looked at
        port = str(taken.getsockname()[1])
        assert f"--port {port} is taken" in refusal_of(capsys, "serve", str(folder), "--dtype", "float32", "--port", port)


def test_a_window_the_model_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "8192" in refusal_of(capsys, "serve", "--port", "0", "--max-model-len", "8193")


def test_a_cache_too_small_for_the_window_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--kv-cache-memory-bytes" in refusal_of(capsys, "serve", "--port", "0", "--kv-cache-memory-bytes", "1MiB")


def test_what_a_file_says_is_told_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", extra_tensors={"two\nlines": np.zeros(5, np.float32)})
    assert main(["serve", str(model)]) == 1
    error = capsys.readouterr().err
    assert "holds the tensor two\\nlines, which" in error
    assert error.count("\n") == 1


def test_status_needs_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers" in capsys.readouterr().err
    assert main(["status", "--url", "ftp://127.0.0.1"]) == 2


def test_a_budget_beyond_the_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal_of(capsys, "serve", "--port", "0", "--kv-cache-memory-bytes", "10T")
    assert "this machine has" in error
    assert "give --kv-cache-memory-bytes of at most" in error


def test_a_step_budget_against_the_window_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give at least 8" in refusal_of(capsys, "serve", "--port", "0", "--max-num-batched-tokens", "1")
    assert "give at most" in refusal_of(capsys, "serve", "--port", "0", "--max-num-batched-tokens", "1000000")


def test_the_address_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert config_of().address == "local"
    for address in ("auto", "10.0.0.1:6379", "head:6379"):
        assert config_of("--address", address).address == address
    for address in ("", "head", "head:", ":6379", "head:70000", "ray://head:10001"):
        assert "HOST:PORT of a Ray cluster" in refusal_of(capsys, "serve", "--address", address)


def test_a_cluster_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert main(["serve", "--port", "0", "--address", address]) == 1
    assert f"no Ray cluster answers at --address {address}" in capsys.readouterr().err


def test_ctrl_c_before_it_serves_needs_no_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_command, "serve_command", interrupt)
    assert main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_warm_prompts_are_files_in_their_order() -> None:
    assert config_of("--warm-prompt", "b.txt", "--warm-prompt=a.json").warm_prompts == (Path("b.txt"), Path("a.json"))
    assert config_of().warm_prompts == ()


@pytest.mark.parametrize("switch", ["--no-enable-prefix-caching", "--prefill-no-enable-prefix-caching"])
def test_warm_prompts_need_a_cache(capsys: pytest.CaptureFixture[str], switch: str) -> None:
    assert "--warm-prompt needs the prefix cache of prefill" in refusal_of(capsys, "serve", "--warm-prompt", "a.txt", switch)
    assert config_of("--warm-prompt", "a.txt", "--decode-no-enable-prefix-caching").warm_prompts


def test_a_warm_prompt_that_cannot_be_used_is_refused_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, file = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "warm.txt"
    argv = ("serve", str(model), "--port", "0", "--max-model-len", "64", "--warm-prompt", str(file))
    assert f"--warm-prompt {file} cannot be read: No such file or directory\n" in refusal_of(capsys, *argv)
    file.write_text("\n")
    assert f"--warm-prompt {file} is empty\n" in refusal_of(capsys, *argv)
    file.write_text("a longer tale " * 100)
    assert f"--warm-prompt {file} " in refusal_of(capsys, *argv)
