"""How a server ends, with a cluster that never comes up. Everything else of it is seen only from outside."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from llm_engine.open_checkpoint import read_model_config
from router.chat_template import read_chat_template
from router.router import Router
from router.tokenizer import read_tokenizer
from serving_core.errors import TwinpoolError
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from tests.tiny_model import write_tiny_gguf
from twinpool import server as server_module
from twinpool.cli import make_parser
from twinpool.cluster import WorkerPlaces
from twinpool.http_server import HttpServer, listen
from twinpool.serve_config import make_serve_config
from twinpool.server import Server
from twinpool.stop_signals import StopSignals
from twinpool.worker_pools import WorkerPools
from twinpool.worker_spec import WorkerSpec
from twinpool.worker_specs import plan_server_cores

T = TypeVar("T")


class AbsentCluster:
    """Never started; ``is_stopped`` and ``is_abandoned`` tell whether it was told to leave nothing behind."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.is_abandoned = False
        self.is_frozen = False
        """Whether ``stop`` never returns."""
        self.loss = asyncio.Event()
        self.num_gpus = 0

    async def start(self, *, num_workers: int) -> WorkerPlaces:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def call(self, function: Callable[[], T]) -> T:
        return function()

    async def wait_lost(self) -> str:
        await self.loss.wait()
        return "Ray's raylet has ended"

    async def stop(self) -> None:
        if self.is_frozen:
            await asyncio.get_running_loop().create_future()
        self.is_stopped = True

    def abandon(self) -> None:
        self.is_abandoned = True


class AskedToFinish(StopSignals):
    """One signal has come already."""

    def __init__(self) -> None:
        super().__init__()
        self.finish.set()


class AskedTwice(AskedToFinish):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stop_now.set()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> AbsentCluster:
    cluster = AbsentCluster()

    def local_cluster(*, num_gpus: int) -> AbsentCluster:
        cluster.num_gpus = num_gpus
        return cluster

    monkeypatch.setattr(server_module, "LocalCluster", local_cluster)
    return cluster


@pytest.fixture
def make_server(tmp_path: Path, cluster: AbsentCluster) -> Iterator[Callable[..., Server]]:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with listen("127.0.0.1", 0) as listener:

        def make(*flags: str) -> Server:
            config = make_serve_config(make_parser().parse_args(["serve", str(path), *flags]))
            return Server(
                config,
                model=read_model_config(path),
                tokenizer=read_tokenizer(path),
                chat_template=read_chat_template(path),
                core_plan=plan_server_cores(config, [0, 1]),
                listener=listener,
            )

        yield make


def test_ray_gets_the_gpus_that_torch_can_use(
    monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server], cluster: AbsentCluster
) -> None:
    monkeypatch.setattr("twinpool.serve_config.num_local_gpus", lambda: 3)
    make_server()
    assert cluster.num_gpus == 3


async def test_http_that_fails_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server], cluster: AbsentCluster
) -> None:
    async def fail(self: HttpServer) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(HttpServer, "run", fail)
    with pytest.raises(OSError, match="too many open files"):
        await make_server().run()
    assert cluster.is_stopped


async def test_a_step_of_the_end_that_fails_skips_no_other(
    monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server], cluster: AbsentCluster
) -> None:
    stop = Router.stop

    async def stop_and_fail(self: Router) -> None:
        await stop(self)
        raise RuntimeError("the router will not stop")

    monkeypatch.setattr(Router, "stop", stop_and_fail)
    monkeypatch.setattr(server_module, "StopSignals", AskedToFinish)
    with pytest.raises(RuntimeError, match="the router will not stop"):
        await make_server().run()
    assert cluster.is_stopped


async def test_one_signal_leaves_ray_in_order(
    monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server], cluster: AbsentCluster
) -> None:
    monkeypatch.setattr(server_module, "StopSignals", AskedToFinish)
    await make_server().run()
    assert cluster.is_stopped
    assert not cluster.is_abandoned


async def test_a_ray_that_does_not_get_on_with_its_end_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server], cluster: AbsentCluster
) -> None:
    monkeypatch.setattr(server_module, "StopSignals", AskedToFinish)
    monkeypatch.setattr(server_module, "RAY_END_TIMEOUT_S", 0.1)
    cluster.is_frozen = True
    await make_server().run()
    assert cluster.is_abandoned


async def test_a_second_signal_abandons_ray(
    monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server], cluster: AbsentCluster
) -> None:
    monkeypatch.setattr(server_module, "StopSignals", AskedTwice)
    cluster.is_frozen = True
    async with asyncio.timeout(server_module.RAY_END_TIMEOUT_S / 2):
        await make_server().run()
    assert cluster.is_abandoned


async def test_the_loss_of_ray_ends_the_server_with_one_sentence(
    make_server: Callable[..., Server], cluster: AbsentCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.loss.set()
    await make_server().run()
    assert cluster.is_abandoned
    assert not cluster.is_stopped
    (error,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert error == "Ray's raylet has ended, so that no worker can be started any more: the server ends"


async def test_one_signal_ends_the_drain_after_the_loss_of_ray(
    monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server], cluster: AbsentCluster
) -> None:
    async def never(self: Router) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Router, "wait_idle", never)
    cluster.loss.set()
    async with asyncio.timeout(server_module.DRAIN_TIMEOUT_S / 2):
        await make_server().run()
    assert cluster.is_abandoned


@pytest.mark.parametrize(
    ("flags", "window"),
    [
        ((), 512),
        (("--max-model-len", "256"), 256),
        (("--prefill-max-model-len", "128", "--decode-max-model-len", "256"), 128),
        (("--decode-max-model-len", "256"), 256),
    ],
)
async def test_the_router_knows_the_window_before_any_worker(
    monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server], flags: tuple[str, ...], window: int
) -> None:
    windows: list[int] = []

    async def note_window(self: Router) -> None:
        windows.append(self.generator.max_model_len)

    async def end(self: HttpServer) -> None:
        pass

    monkeypatch.setattr(Router, "stop", note_window)
    monkeypatch.setattr(HttpServer, "run", end)
    await make_server(*flags).run()
    assert windows == [window]


async def test_router_and_workers_get_one_token(
    monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server], cluster: AbsentCluster
) -> None:
    tokens: list[ClusterToken] = []

    def note_router(**options: Any) -> Router:
        tokens.append(options["cluster_token"])
        return Router(**options)

    async def start_cluster(*, num_workers: int) -> WorkerPlaces:
        return WorkerPlaces(host="127.0.0.1")

    async def note_workers(self: WorkerPools, specs: Sequence[WorkerSpec], places: WorkerPlaces) -> None:
        tokens.extend(spec.cluster_token for spec in specs)
        raise TwinpoolError("no worker is started in this test")

    monkeypatch.setattr(server_module, "Router", note_router)
    monkeypatch.setattr(server_module, "confine_process_tree", lambda cores: None)
    monkeypatch.setattr(cluster, "start", start_cluster)
    monkeypatch.setattr(WorkerPools, "start", note_workers)
    with pytest.raises(TwinpoolError, match="no worker is started"):
        await make_server().run()
    assert tokens == [tokens[0]] * 3, "of the router, prefill-0 and decode-0"
    assert tokens[0] != OPEN
