"""Which nodes of a joined cluster take workers, and what is said when they do not suffice."""

from __future__ import annotations

import pytest

from serving_core.errors import PlacementFailed
from twinpool.cluster import WorkerPlaces
from twinpool.worker_places import WORKER_RESOURCE, ClusterNode, find_worker_places, gpus_per_worker

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


@pytest.mark.parametrize(
    ("num_gpus", "num_workers", "share"), [(0, 2, 0.0), (1, 1, 1.0), (1, 2, 0.5), (2, 3, 0.5), (4, 3, 1.0), (8, 8, 1.0)]
)
def test_workers_of_a_node_share_its_gpus(num_gpus: int, num_workers: int, share: float) -> None:
    assert gpus_per_worker(num_gpus, num_workers) == share


def test_gpus_count_only_where_every_node_has_them() -> None:
    with_gpus, without = ClusterNode(num_cores=8, num_places=2, num_gpus=1), ClusterNode(num_cores=8, num_places=2)
    assert find_worker_places([with_gpus, with_gpus], 4, host=HOST).num_gpus == 0.5
    assert find_worker_places([with_gpus, without], 4, host=HOST).num_gpus == 0.0
    everywhere = ClusterNode(num_cores=8, num_places=None, num_gpus=2)
    assert find_worker_places([everywhere, everywhere], 4, host=HOST).num_gpus == 1.0


def test_too_few_places() -> None:
    with pytest.raises(PlacementFailed, match=r"5 workers need 5 of the Ray resource twinpool_worker, but .* have 4:"):
        find_worker_places([node(0), node(8, 1), node(8, 3)], 5, host=HOST)


def test_no_node_at_all() -> None:
    with pytest.raises(PlacementFailed, match="no living node"):
        find_worker_places([], 1, host=HOST)
