"""Which nodes of a joined cluster take workers, and what is said when they do not suffice."""

from __future__ import annotations

import pytest

from serving_core.errors import PlacementFailed
from twinpool.cluster import WorkerPlaces
from twinpool.worker_places import WORKER_RESOURCE, ClusterNode, find_worker_places

HOST = "10.0.0.1"


def node(num_cores: int, num_places: int | None = None) -> ClusterNode:
    return ClusterNode(num_cores=num_cores, num_places=num_places)


def test_without_the_resource_every_node_takes_workers() -> None:
    places = find_worker_places([node(16), node(8)], 3, host=HOST)
    assert places == WorkerPlaces(host=HOST, num_cores=4)  # two of the three may meet on the node with eight


def test_with_the_resource_only_nodes_that_carry_it_count() -> None:
    places = find_worker_places([node(0), node(64, 0), node(8, 2), node(32, 4)], 3, host=HOST)
    assert places == WorkerPlaces(host=HOST, resources={WORKER_RESOURCE: 1}, num_cores=4)


def test_cores_are_not_divided_by_places_that_stay_empty() -> None:
    assert find_worker_places([node(8, 100)], 2, host=HOST).num_cores == 4


def test_a_node_without_cores_still_gives_one_thread() -> None:
    assert find_worker_places([node(0, 4)], 2, host=HOST).num_cores == 1


def test_too_few_places() -> None:
    with pytest.raises(PlacementFailed, match=r"5 workers need 5 of the Ray resource twinpool_worker, but .* have 4:"):
        find_worker_places([node(0), node(8, 1), node(8, 3)], 5, host=HOST)


def test_no_node_at_all() -> None:
    with pytest.raises(PlacementFailed, match="no living node"):
        find_worker_places([], 1, host=HOST)
