"""A worker in a thread, with a tiny model and a router that is not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from llm_engine.load_model import LoadedModel
from serving_core.engine_config import EngineConfig
from serving_core.errors import ConfigError, ModelFileError
from serving_core.ids import WorkerId
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.tiny_model import write_tiny_gguf
from twinpool.worker_spec import WorkerSpec
from twinpool.worker_thread import WorkerThread

ENGINE = EngineConfig(
    dtype=KVDType.FLOAT32,
    page_size=16,
    max_model_len=None,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    kv_cache_memory_bytes=2**22,
    num_threads=1,
)


def spec_of(path: Path) -> WorkerSpec:
    return WorkerSpec(
        worker_id=WorkerId("colocated-0"),
        phases=frozenset(PhaseName),
        model_path=path,
        model_name="tiny",
        engine=ENGINE,
        router_addresses=("127.0.0.1:9",),
    )


def test_life(tmp_path: Path) -> None:
    worker = WorkerThread(spec_of(write_tiny_gguf(tmp_path / "tiny.gguf")))
    # 1. nothing has begun
    worker.stop()
    # 2. it starts, and tells how far it is
    worker.start()
    seen = list(worker.watch_start())
    assert seen[-1].num_bytes_loaded == seen[-1].num_bytes > 0
    loaded = [progress.num_bytes_loaded for progress in seen]
    assert loaded == sorted(loaded)
    # 3. a second watcher finds it ready
    assert list(worker.watch_start()) == []
    # 4. it ends, once
    worker.stop()
    worker.join()
    worker.stop()


@pytest.mark.parametrize(("gpu_share", "num_gpus", "device"), [(0.0, 1, "cpu"), (0.5, 1, "cuda:0"), (0.5, 0, "cpu")])
def test_it_computes_on_its_share_of_a_gpu(
    gpu_share: float, num_gpus: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []
    limits: list[tuple[float, str]] = []

    def load_model(path: Path, *, device: torch.device, **_: object) -> LoadedModel:
        devices.append(str(device))
        raise ConfigError("far enough")

    def limit(share: float, device: torch.device) -> None:
        limits.append((share, str(device)))

    monkeypatch.setattr("llm_engine.device.num_usable_gpus", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    monkeypatch.setattr("llm_engine.load_model.load_model", load_model)
    worker = WorkerThread(dataclasses.replace(spec_of(tmp_path / "tiny.gguf"), gpu_share=gpu_share))
    worker.start()
    with pytest.raises(ConfigError, match="far enough"):
        list(worker.watch_start())
    worker.join()
    assert devices == [device]
    assert limits == ([] if device == "cpu" else [(gpu_share, device)])


def test_a_start_that_fails_is_told_to_every_watcher(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", omit=frozenset({"output_norm.weight"}))
    worker = WorkerThread(spec_of(path))
    worker.start()
    for _ in range(2):
        with pytest.raises(ModelFileError, match="output_norm"):
            list(worker.watch_start())
    worker.join()
    worker.stop()


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(spec_of(write_tiny_gguf(tmp_path / "tiny.gguf")), host="192.0.2.1")
    worker = WorkerThread(elsewhere)
    worker.start()
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        list(worker.watch_start())
    worker.join()


def test_a_missing_file(tmp_path: Path) -> None:
    worker = WorkerThread(spec_of(tmp_path / "nowhere.gguf"))
    worker.start()
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf"):
        list(worker.watch_start())
