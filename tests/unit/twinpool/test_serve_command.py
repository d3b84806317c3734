"""What is done where the native kernels do not run."""

from __future__ import annotations

import logging
import socket

import pytest

from llm_engine.open_checkpoint import read_model_config
from serving_core.errors import ConfigError
from serving_core.worker_status import PhaseName
from twinpool import serve_command, server
from twinpool.cli import make_parser
from twinpool.serve_config import ServeConfig, make_serve_config
from twinpool.worker_specs import make_worker_specs, plan_server_cores

WHY_NOT = "cannot be built (c++: status 1)"


def wants_kernels(*argv: str) -> bool:
    config = make_serve_config(make_parser().parse_args(["serve", *argv]))
    model = read_model_config(config.model.path)
    specs = make_worker_specs(config, model, plan_server_cores(config, range(2)), ())
    return serve_command._wants_kernels(config, specs, model)


def serve(monkeypatch: pytest.MonkeyPatch, why_no_kernels: str | None, *argv: str) -> ServeConfig:
    """Serves nothing. Returns what the server was told."""
    served = []

    class FakeServer:
        def __init__(self, config: ServeConfig, *, listener: socket.socket, **_: object) -> None:
            served.append(config)

        async def run(self) -> None:
            pass

    monkeypatch.setattr(serve_command, "why_no_kernels", lambda: why_no_kernels)
    monkeypatch.setattr(server, "Server", FakeServer)
    for name in ("GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY"):  # put back at the end
        monkeypatch.setenv(name, "")
    flags = make_parser().parse_args(["serve", "--port", "0", "--kv-cache-memory-bytes", "192MiB", *argv])
    assert serve_command.serve_command(flags) == 0
    return served[0]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.serve_config.num_local_gpus", lambda: 0)


def test_kernels_are_looked_for_where_somebody_uses_them() -> None:
    assert wants_kernels("--dtype", "bfloat16")
    assert wants_kernels("--dtype", "bfloat16", "--prefill-enforce-eager")
    assert not wants_kernels("--dtype", "bfloat16", "--enforce-eager")
    assert not wants_kernels("--dtype", "float32")
    assert not wants_kernels("--dtype", "bfloat16", "--address", "auto"), "they are needed on others' nodes"


def test_on_gpus_nobody_looks_for_kernels_and_each_worker_checks_its_own_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twinpool.serve_config.num_local_gpus", lambda: 2)
    monkeypatch.setattr(serve_command, "available_memory_bytes", lambda: 0)
    assert not wants_kernels("--dtype", "bfloat16")
    with caplog.at_level(logging.INFO):
        config = serve(monkeypatch, WHY_NOT)
    assert (config.num_gpus, config.is_on_gpus) == (2, True)
    assert not any("kernels" in message for message in caplog.messages)
    with pytest.raises(ConfigError, match="int8, which only CPUs compute"):
        serve(monkeypatch, WHY_NOT, "--decode-quantization", "int8")


def test_on_others_nodes_it_is_not_known_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.serve_config.num_local_gpus", lambda: 2)
    config = serve(monkeypatch, WHY_NOT, "--address", "auto", "--decode-quantization", "int8")
    assert not config.is_on_gpus


def test_where_they_do_not_run_no_worker_looks_for_them_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        config = serve(monkeypatch, WHY_NOT, "--dtype", "bfloat16")
    assert all(config.flags_of(phase).enforce_eager for phase in PhaseName)
    assert [record.message for record in caplog.records if "kernels" in record.message] == [
        f"Torch computes: the native kernels {WHY_NOT}."
    ]

    config = serve(monkeypatch, None, "--dtype", "bfloat16")
    assert not any(config.flags_of(phase).enforce_eager for phase in PhaseName)


@pytest.mark.parametrize("flag", ["--decode-quantization", "--quantization"])
def test_a_form_that_needs_them_is_refused_with_flag_and_reason(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as refused:
        serve(monkeypatch, WHY_NOT, "--dtype", "bfloat16", flag, "int8")
    assert str(refused.value) == (
        f"{flag} is int8, which needs the native kernels, which cannot be built (c++: status 1); give {flag} none."
    )
