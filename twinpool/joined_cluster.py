"""A Ray cluster that others run: joined for as long as the server lives, and left as it was found.

This machine must be one of its nodes, since Ray lets a process in through the node it runs on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from serving_core.errors import TwinpoolError
from twinpool.cluster import AUTO, WorkerPlaces
from twinpool.node_address import node_address
from twinpool.ray_thread import RayThread
from twinpool.worker_places import WORKER_RESOURCE, ClusterNode, find_worker_places

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 10


class JoinedCluster:
    """See ``Cluster``. ``address`` is HOST:PORT of the cluster's control store (GCS), or ``auto`` for the one that this machine
    is a node of."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._thread = RayThread()
        self._is_joined = False

    async def start(self, *, num_workers: int) -> WorkerPlaces:
        """Join. Raises ``PlacementFailed`` when the cluster has no room, ``TwinpoolError`` when it cannot be joined."""
        return await self._thread.call(lambda: self._join(num_workers))

    async def call(self, function: Callable[[], T]) -> T:
        """See ``Cluster``."""
        return await self._thread.call(function)

    async def stop(self) -> None:
        """Leave the cluster; Ray ends whatever this process has started there. Idempotent."""
        if self._is_joined:
            self._is_joined = False
            await self._thread.call(_leave)
        self._thread.end()

    def _join(self, num_workers: int) -> WorkerPlaces:
        # Ray reads these when it is imported
        if os.environ.get("RAY_AUTH_TOKEN"):
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", str(_JOIN_TIMEOUT_S))
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
        import ray

        if self._address != AUTO:
            _check_reachable(self._address)
        try:
            ray.init(address=self._address, log_to_driver=True, logging_level=40)
        except ConnectionError as error:
            raise TwinpoolError(self._explain_refusal()) from error
        except RuntimeError as error:  # other versions of Ray or Python over there
            raise TwinpoolError(f"--address {self._address} cannot be joined: {' '.join(str(error).split())}") from error
        self._is_joined = True
        nodes = [_node_of(entry) for entry in ray.nodes() if entry["Alive"]]  # type: ignore[no-untyped-call]
        return find_worker_places(nodes, num_workers, host=node_address())

    def _explain_refusal(self) -> str:
        if self._address == AUTO:
            return "--address auto finds no Ray cluster that this machine is a node of: 'ray start' makes it one"
        return (
            f"the Ray cluster at {self._address} does not let us in: this machine must be one of its nodes (make it one with "
            f"'ray start --address={self._address}'), and RAY_AUTH_TOKEN must be the cluster's token where it has one"
        )


def _check_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise TwinpoolError(f"no Ray cluster answers at --address {address}: {error.strerror or error}") from error


def _node_of(entry: Mapping[str, Any]) -> ClusterNode:
    resources = entry["Resources"]
    places = resources.get(WORKER_RESOURCE)
    return ClusterNode(
        num_cores=int(resources.get("CPU", 0)),
        num_places=None if places is None else int(places),
    )


def _leave() -> None:
    import ray

    ray.shutdown()
