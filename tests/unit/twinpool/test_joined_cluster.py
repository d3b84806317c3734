"""Which clusters are refused, and in which words, before Ray is asked to join them."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from ray._private import services

from serving_core.errors import TwinpoolError
from twinpool import joined_cluster
from twinpool.cluster import AUTO
from twinpool.joined_cluster import JoinedCluster


@pytest.fixture(autouse=True)
def no_ray_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was asked to join"))
    monkeypatch.setattr(joined_cluster, "_ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("RAY_AUTH_MODE", "RAY_gcs_server_request_timeout_seconds", "RAY_USAGE_STATS_ENABLED", "RAY_DEDUP_LOGS"):
        monkeypatch.setenv(name, "0")  # joining sets them; this puts them back afterwards


@pytest.fixture
def silent() -> Iterator[str]:
    """HOST:PORT where connections are taken and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def refusal_of(address: str) -> str:
    cluster = JoinedCluster(address)
    with pytest.raises(TwinpoolError) as caught:
        await cluster.start(num_workers=1)
    await cluster.stop()
    return str(caught.value)


async def test_where_nothing_answers(silent: str) -> None:
    assert await refusal_of(silent) == f"no Ray cluster answers at --address {silent}: it said nothing for 1 s"


async def test_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    words = await refusal_of(address)
    assert words.startswith(f"no Ray cluster answers at --address {address}: ")
    assert "Connection refused" in words


async def test_where_another_grpc_server_answers() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    words = await refusal_of(f"127.0.0.1:{port}")
    assert words == f"no Ray cluster answers at --address 127.0.0.1:{port}: Method not found!"
    await server.stop(None)


async def test_the_environments_address_is_named(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", silent)
    assert await refusal_of(AUTO) == f"no Ray cluster answers at RAY_ADDRESS {silent}: it said nothing for 1 s"


@pytest.mark.parametrize("address", ["local", "ray://127.0.0.1:10001", "nonsense"])
async def test_an_environment_that_names_no_control_store(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert await refusal_of(AUTO) == f"RAY_ADDRESS is {address!r}, but must be HOST:PORT of a Ray cluster"


async def test_a_cluster_that_this_machine_once_was_a_node_of(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: silent)
    assert (
        await refusal_of(AUTO) == f"no Ray cluster answers at {silent}, which --address auto has found: it said nothing for 1 s"
    )


async def test_no_cluster_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: None)
    assert "'ray start' makes it one" in await refusal_of(AUTO)


@pytest.fixture
async def guarded() -> AsyncIterator[str]:
    """HOST:PORT of what asks for a token, as Ray does."""

    async def refuse(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        raise AssertionError

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"GetClusterId": grpc.unary_unary_rpc_method_handler(refuse)}
    server = grpc.aio.server(handlers=[grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("no"), "the Ray cluster at {} does not let us in: this machine must be one of its nodes"),
        (RuntimeError("Version mismatch:\n Ray 2.9"), "--address {} cannot be joined: Version mismatch: Ray 2.9"),
    ],
)
async def test_a_ray_that_does_not_let_us_in(
    guarded: str, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr("ray.init", refuse)
    assert (await refusal_of(guarded)).startswith(words.format(guarded))


async def test_a_ray_that_freezes_while_it_is_joined(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thawed = threading.Event()
    monkeypatch.setattr("ray.init", lambda **_: thawed.wait() and pytest.fail("nobody waits for it any more"))
    monkeypatch.setattr(joined_cluster, "_JOIN_TIMEOUT_S", 0.5)
    with pytest.raises(TwinpoolError, match=f"the Ray cluster of --address {guarded} stopped answering while we joined it"):
        await JoinedCluster(guarded).start(num_workers=1)
    thawed.set()


def test_the_raylet_of_this_machine_is_found_by_its_socket(tmp_path: Path) -> None:
    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/sh")
    socket_name = f"{tmp_path}/sockets/raylet"
    arguments = [str(raylet), "-c", "read line", f"--raylet_socket_name={socket_name}"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:
        assert joined_cluster._find_raylet(socket_name) == process.pid
        assert joined_cluster._find_raylet(f"{socket_name}.1") is None
        process.kill()
