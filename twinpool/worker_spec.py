"""What one worker is told when it starts. Plain values: it is also what a restart by Ray starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving_core.engine_config import EngineConfig
from serving_core.ids import WorkerId
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.worker_status import PhaseName
from twinpool.transfer_way import TransferWay


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One place in a pool. ``router_addresses`` are HOST:PORT of every router's link server; ``host`` is the address the worker
    itself listens on, at a port of the system's choice. ``gpu_share`` is what it was given of a GPU to compute on, where its
    torch can: 0 for nothing, 1 for all of it. ``is_fabric_trusted``: see ``fabric``.
    ``cluster_token`` is the server's, for all who belong to it."""

    worker_id: WorkerId
    phases: frozenset[PhaseName]
    model_path: Path
    model_name: str
    engine: EngineConfig
    router_addresses: tuple[str, ...]
    host: str = "127.0.0.1"
    transfer: TransferWay = TransferWay.AUTO
    is_fabric_trusted: bool = True
    gpu_share: float = 0.0
    cluster_token: ClusterToken = OPEN
