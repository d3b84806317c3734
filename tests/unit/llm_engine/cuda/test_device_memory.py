"""What does not fit onto a device, or into a worker's share of it, is refused. Torch's figures are played."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm_engine.cuda.device_memory import limit_to_share, room_for
from llm_engine.kv_cache import KVCache
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType, KVPageLayout

DEVICE = torch.device("cuda:0")
GIB = 2**30
LAYOUT = KVPageLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=256, dtype=KVDType.BFLOAT16)


class PlayedMemory:
    """24 GiB, of which others have taken 4."""

    def __init__(self) -> None:
        self.allocated = 0
        self.share = 1.0

    def limit(self, share: float, device: torch.device) -> None:
        assert device == DEVICE
        self.share = share


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> PlayedMemory:
    played = PlayedMemory()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB - played.allocated, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: played.allocated)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", played.limit)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: played.share)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    return played


def put(num_bytes: int) -> None:
    with room_for(DEVICE, num_bytes, "the KV cache takes", "give a smaller one"):
        pass


def test_what_is_free_is_there_for_a_worker_alone(memory: PlayedMemory) -> None:
    limit_to_share(DEVICE, 1.0)
    put(20 * GIB)
    with pytest.raises(
        ConfigError, match=r"^the KV cache takes 21.0 GiB, but Some GPU has 20.0 GiB left: give a smaller one\.$"
    ):
        put(21 * GIB)


def test_workers_of_one_device_keep_to_their_shares(memory: PlayedMemory) -> None:
    limit_to_share(DEVICE, 0.5)
    put(12 * GIB)
    memory.allocated = 8 * GIB
    put(4 * GIB)
    with pytest.raises(
        ConfigError,
        match=r"^the KV cache takes 5.0 GiB, but Some GPU, of which this worker may take 50%, has 4.0 GiB left: give a smaller",
    ):
        put(5 * GIB)


def test_what_others_take_meanwhile_is_refused_as_well(memory: PlayedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*_: object, **__: object) -> Tensor:
        memory.allocated = 19 * GIB
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", overflow)
    with pytest.raises(
        ConfigError,
        match=r"^the KV cache takes more than there is: Some GPU has 1.0 GiB left; give a smaller --kv-cache-memory-bytes\.$",
    ):
        KVCache(LAYOUT, 1, device=DEVICE)


def test_a_cache_beyond_the_share_is_never_made(memory: PlayedMemory) -> None:
    limit_to_share(DEVICE, 0.5)
    num_pages = 13 * GIB // LAYOUT.page_bytes
    with pytest.raises(ConfigError, match=r"^the KV cache takes 13.0 GiB, but .* has 12.0 GiB left: give a smaller --kv-cache"):
        KVCache(LAYOUT, num_pages, device=DEVICE)


def test_of_other_devices_no_figures_are_known() -> None:
    with room_for(torch.device("meta"), 2**60, "the KV cache takes", "give a smaller one"):
        pass
