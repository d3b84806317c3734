"""Which clusters are refused, and in which words, before Ray is asked to join them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from ray._private import services
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from serving_core.errors import TwinpoolError
from twinpool import joined_cluster
from twinpool.cluster import AUTO
from twinpool.joined_cluster import JoinedCluster

TOKEN = "the cluster's"


@pytest.fixture(autouse=True)
def no_ray_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was asked to join"))
    monkeypatch.setattr(joined_cluster, "_ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in (
        "RAY_AUTH_MODE",
        "RAY_gcs_server_request_timeout_seconds",
        "RAY_USAGE_STATS_ENABLED",
        "RAY_DEDUP_LOGS",
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER",
    ):
        monkeypatch.setenv(name, "0")  # joining sets them; this puts them back afterwards
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    set_token(monkeypatch, TOKEN)


@pytest.fixture
def silent() -> Iterator[str]:
    """HOST:PORT where connections are taken and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def set_token(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    if token is None:
        monkeypatch.delenv("RAY_AUTH_TOKEN")
    else:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    AuthenticationTokenLoader.instance().reset_cache()


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


async def serve_ray(*, token: str | None) -> tuple[grpc.aio.Server, str]:
    """What asks for ``token``, as Ray does, or for none, and its HOST:PORT."""

    async def answer(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        if token is not None and ("authorization", f"Bearer {token}") not in (context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"GetClusterId": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server(handlers=[grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@pytest.fixture
async def guarded() -> AsyncIterator[str]:
    """HOST:PORT of a cluster that asks for ``TOKEN``."""
    server, address = await serve_ray(token=TOKEN)
    yield address
    await server.stop(None)


@pytest.fixture
async def unguarded() -> AsyncIterator[str]:
    """HOST:PORT of a cluster that asks for no token."""
    server, address = await serve_ray(token=None)
    yield address
    await server.stop(None)


async def test_another_token_than_the_clusters(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_token(monkeypatch, "another")
    words = f"--address {guarded} refuses the token of RAY_AUTH_TOKEN: set RAY_AUTH_TOKEN to the cluster's"
    assert await refusal_of(guarded) == words


@pytest.mark.parametrize("is_path_set", [False, True])
async def test_no_token_for_a_cluster_that_asks_for_one(
    guarded: str, is_path_set: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    source = "~/.ray/auth_token"
    if is_path_set:
        source = "RAY_AUTH_TOKEN_PATH"
        monkeypatch.setenv(source, str(tmp_path / "missing"))
    set_token(monkeypatch, None)
    words = f"--address {guarded} asks for a token and {source} has none: set RAY_AUTH_TOKEN to the cluster's"
    assert await refusal_of(guarded) == words


async def test_a_token_for_a_cluster_that_asks_for_none(unguarded: str) -> None:
    words = (
        f"--address {unguarded} asks for no token, but RAY_AUTH_TOKEN is set: "
        "unset it, or start the cluster with the same token"
    )
    assert await refusal_of(unguarded) == words


async def test_the_token_file_counts_where_a_token_is_asked_for(
    guarded: str, unguarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note_mode(**_: object) -> None:
        raise RuntimeError(os.environ["RAY_AUTH_MODE"])

    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path))
    set_token(monkeypatch, None)
    monkeypatch.setattr("ray.init", note_mode)
    for address, mode in ((guarded, "token"), (unguarded, "disabled")):
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        assert await refusal_of(address) == f"--address {address} cannot be joined: {mode}"


async def test_a_cluster_that_asks_for_a_token_is_protected(
    guarded: str, unguarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await asyncio.to_thread(joined_cluster._prepare_token, guarded, "it")
    set_token(monkeypatch, None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not await asyncio.to_thread(joined_cluster._prepare_token, unguarded, "it")


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
