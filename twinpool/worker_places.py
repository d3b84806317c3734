"""Decides on which nodes of a joined cluster workers may run. Asks nobody: the nodes are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving_core.errors import PlacementFailed
from twinpool.cluster import WorkerPlaces

WORKER_RESOURCE = "twinpool_worker"
"""A node that carries this Ray resource takes that many workers. Where no node carries it, every node takes any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A living node: its cores and GPUs as Ray was told, and how many workers it takes (None: it says nothing about that)."""

    num_cores: int
    num_places: int | None
    num_gpus: int = 0


def find_worker_places(nodes: Sequence[ClusterNode], num_workers: int, *, host: str) -> WorkerPlaces:
    """Where ``num_workers`` workers may run, which reach us at ``host``. Raises ``PlacementFailed`` with what is missing."""
    offering = [(node, node.num_places) for node in nodes if node.num_places is not None]
    if not nodes:
        raise PlacementFailed("the Ray cluster has no living node: start one with 'ray start'")
    if not offering:
        workers_per_node = -(-num_workers // len(nodes))
        return WorkerPlaces(
            host=host,
            num_cores=_cores_per_worker(nodes, workers_per_node),
            num_gpus=min(gpus_per_worker(node.num_gpus, workers_per_node) for node in nodes),
        )
    num_places = sum(places for _, places in offering)
    if num_places < num_workers:
        raise PlacementFailed(
            f"{num_workers} workers need {num_workers} of the Ray resource {WORKER_RESOURCE}, but the cluster's nodes have "
            f"{num_places}: start nodes with more of it, or ask for fewer workers"
        )
    taking = [(node, places) for node, places in offering if places > 0]
    return WorkerPlaces(
        host=host,
        resources={WORKER_RESOURCE: 1},
        num_cores=min(_cores_per_worker([node], min(places, num_workers)) for node, places in taking),
        num_gpus=min(gpus_per_worker(node.num_gpus, min(places, num_workers)) for node, places in taking),
    )


def gpus_per_worker(num_gpus: int, num_workers: int) -> float:
    """What each of a node's workers takes of its GPUs: one, or an equal part of one."""
    return 0.0 if num_gpus == 0 else 1.0 / -(-num_workers // num_gpus)


def _cores_per_worker(nodes: Sequence[ClusterNode], workers_per_node: int) -> int:
    return max(1, min(node.num_cores for node in nodes) // workers_per_node)
