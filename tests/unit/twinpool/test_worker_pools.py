"""The pools over actors that we play ourselves: how often a worker may die, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray

from serving_core.engine_config import EngineConfig
from serving_core.errors import ModelFileError, TwinpoolError
from serving_core.ids import WorkerId
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from twinpool import worker_pools
from twinpool.cluster import WorkerPlaces
from twinpool.worker_pools import WorkerPools
from twinpool.worker_spec import WorkerSpec
from twinpool.worker_thread import LoadProgress

T = TypeVar("T")

WORKER_ID = WorkerId("decode-0")
SPEC = WorkerSpec(
    worker_id=WORKER_ID,
    phases=frozenset({PhaseName.DECODE}),
    model_path=Path("tiny.gguf"),
    model_name="tiny",
    engine=EngineConfig(
        dtype=KVDType.FLOAT32,
        page_size=16,
        max_model_len=None,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=2**22,
        num_threads=1,
    ),
    router_addresses=(),
)
PROGRESS = LoadProgress(num_bytes_loaded=1, num_bytes=2)
AWAY = ray.exceptions.ActorUnavailableError("it is restarting", None)
DIED = ray.exceptions.ActorDiedError()


class PlayedCall:
    """One method of an actor, called as Ray wants it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def options(self, **_: object) -> PlayedCall:
        return self

    def remote(self) -> Any:
        return self._function()


class PlayedActor:
    """Every start goes as the next of ``starts`` says: None serves, an error ends it after the first report, and an error in a
    tuple before it. Every life ends as the next of ``lives`` says, the last one never."""

    def __init__(self, starts: list[Exception | tuple[Exception] | None], lives: list[Exception] | None = None) -> None:
        self.starts = starts
        self.lives = lives or []
        self.watched = asyncio.Event()
        """Set when a life without an end is watched."""
        self.watch_start = PlayedCall(self._watch_start)
        self.watch_life = PlayedCall(self._watch_life)

    async def _watch_start(self) -> AsyncIterator[Any]:
        end = self.starts.pop(0)
        if isinstance(end, tuple):
            raise end[0]
        yield _report()
        if end is not None:
            raise end

    async def _watch_life(self) -> None:
        if not self.lives:
            self.watched.set()
            await asyncio.get_running_loop().create_future()
        raise self.lives.pop(0)


async def _report() -> LoadProgress:
    return PROGRESS


class PlayedCluster:
    """Runs what it is told to on the spot."""

    async def start(self, *, num_workers: int) -> WorkerPlaces:
        return WorkerPlaces(host="127.0.0.1")

    async def call(self, function: Callable[[], T]) -> T:
        return function()

    async def wait_lost(self) -> str:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def stop(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class Told:
    """Notes what it is shown and told, in one word each."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def show_progress(self, worker_id: WorkerId, progress: LoadProgress) -> None:
        assert (worker_id, progress) == (WORKER_ID, PROGRESS)

    def show_ready(self, worker_id: WorkerId, seconds: float) -> None:
        self.words.append("ready")

    def on_restart(self, worker_id: WorkerId) -> None:
        self.words.append("restart")

    def on_failure(self, worker_id: WorkerId) -> None:
        self.words.append("failure")


async def started(monkeypatch: pytest.MonkeyPatch, actor: PlayedActor, told: Told) -> WorkerPools:
    class ActorClass:
        def options(self, **_: object) -> ActorClass:
            return self

        def remote(self, spec: WorkerSpec) -> PlayedActor:
            return actor

    monkeypatch.setattr(ray, "remote", lambda _: ActorClass())
    monkeypatch.setattr(worker_pools, "RESTART_BACK_OFF_S", 0.0)
    pools = WorkerPools(PlayedCluster(), told, on_restart=told.on_restart, on_failure=told.on_failure)
    await pools.start([SPEC], WorkerPlaces(host="127.0.0.1"))
    return pools


@pytest.mark.parametrize("num_gpus", [0.0, 0.5, 1.0])
async def test_a_worker_is_told_what_it_got_of_a_gpu(num_gpus: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    given: list[WorkerSpec] = []

    class ActorClass:
        def options(self, **options: object) -> ActorClass:
            asked.append(options["num_gpus"])
            return self

        def remote(self, spec: WorkerSpec) -> PlayedActor:
            given.append(spec)
            return PlayedActor([None])

    monkeypatch.setattr(ray, "remote", lambda _: ActorClass())
    told = Told()
    pools = WorkerPools(PlayedCluster(), told, on_restart=told.on_restart, on_failure=told.on_failure)
    await pools.start([SPEC], WorkerPlaces(host="127.0.0.1", num_gpus=num_gpus))
    assert asked == [num_gpus]
    assert [spec.gpu_share for spec in given] == [num_gpus]


async def test_a_worker_that_keeps_dying_at_its_first_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    # between two deaths Ray takes its time to bring the process back, which is no death
    pools = await started(monkeypatch, PlayedActor([AWAY, (AWAY,), (AWAY,), DIED, (DIED,)]), told)
    with pytest.raises(TwinpoolError, match=r"decode-0 died 3 times while it started and is given up.*died unexpectedly"):
        await pools.wait_ready()
    assert told.words == ["restart", "restart"]


async def test_a_worker_may_die_twice_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    pools = await started(monkeypatch, PlayedActor([DIED, DIED, (AWAY,), (AWAY,), (AWAY,), None]), told)
    await pools.wait_ready()
    assert told.words == ["restart", "restart", "ready"]


async def test_a_worker_that_has_served_is_started_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told, killed = Told(), list[object]()
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))
    missing = ray.exceptions.RayTaskError(  # type: ignore[no-untyped-call]
        function_name="watch_start", traceback_str="", cause=ModelFileError("the file is gone")
    )
    actor = PlayedActor([None, DIED, DIED, DIED, DIED, None, missing, None], lives=[AWAY, AWAY, AWAY])
    pools = await started(monkeypatch, actor, told)
    # 1. it serves
    await pools.wait_ready()
    watching = asyncio.create_task(pools.watch())
    # 2. it dies, and then more often than a first start may; 3. it dies again, cannot start, is killed; 4. it serves
    async with asyncio.timeout(5):
        await actor.watched.wait()
    assert told.words == ["ready", *["restart"] * 5, "ready", "restart", "failure", "restart", "ready"]
    assert killed == [actor]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
