"""What a server needs of the Ray cluster its workers run on, whoever owns that cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

T = TypeVar("T")

LOCAL = "local"
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlaces:
    """Where the workers of one server may run. ``host`` is the address under which they reach this process. ``resources`` is
    what each of them takes of a node. ``num_cores`` are those that one worker may count on, or None on this machine alone,
    whose cores ``core_plan`` divides. ``num_gpus`` is what each of them takes of a node's GPUs: 0 where not every node has one,
    and all workers compute on CPUs. ``is_protected``: the cluster keeps strangers out by a token."""

    host: str
    resources: Mapping[str, float] = field(default_factory=dict)
    num_cores: int | None = None
    num_gpus: float = 0.0
    is_protected: bool = False


class Cluster(Protocol):
    """Life: 1. ``start``; 2. ``call`` anything of Ray's; 3. ``stop``, which may come after any of these; ``abandon`` instead
    of it, or when it does not return."""

    async def start(self, *, num_workers: int) -> WorkerPlaces:
        """Make Ray usable for ``num_workers`` workers. Raises ``TwinpoolError`` when it cannot be."""

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function``, which may block on Ray, on the cluster's thread."""

    async def wait_lost(self) -> str:
        """Until a part of Ray is gone without which no worker can be started any more. Returns what, as the beginning of a
        sentence. May be called before ``start``."""

    async def stop(self) -> None:
        """Leave nothing of ours behind. Waits for Ray. Idempotent."""

    def abandon(self) -> None:
        """Leave nothing of ours behind, at once and without Ray's help. This process then ends as ``RayThread.abandon`` says.
        Idempotent."""
