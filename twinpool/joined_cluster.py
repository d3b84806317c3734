"""A Ray cluster that others run: joined for as long as the server lives, and left as it was found.

This machine must be one of its nodes, since Ray lets a process in through the node it runs on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
import psutil

from serving_core.errors import TwinpoolError
from twinpool.cluster import AUTO, WorkerPlaces
from twinpool.local_gpus import torch_has_cuda
from twinpool.node_address import node_address
from twinpool.ray_loss import RayLoss
from twinpool.ray_thread import RayThread
from twinpool.worker_places import WORKER_RESOURCE, ClusterNode, find_worker_places

T = TypeVar("T")

_ANSWER_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 10
_JOIN_TIMEOUT_S = 60.0
"""A cluster that answers lets us in within seconds, unless it stops answering meanwhile."""
_TOKEN_FILE = "~/.ray/auth_token"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Membership:
    """What came of joining: ``control_store`` is its HOST:PORT, and ``raylet`` the process id of this machine's part of Ray, or
    None when it runs where we cannot see it."""

    places: WorkerPlaces
    control_store: str
    raylet: int | None


class JoinedCluster:
    """See ``Cluster``. ``address`` is HOST:PORT of the cluster's control store (GCS), or ``auto`` for the one that
    ``RAY_ADDRESS`` names, or else the one that this machine is a node of."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._thread = RayThread()
        self._loss = RayLoss()
        self._is_joined = False

    async def start(self, *, num_workers: int) -> WorkerPlaces:
        """Join. Raises ``PlacementFailed`` when the cluster has no room, ``TwinpoolError`` when it cannot be joined."""
        try:
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                membership = await self._thread.call(lambda: self._join(num_workers))
        except TimeoutError as error:
            raise TwinpoolError(f"the Ray cluster of --address {self._address} stopped answering while we joined it") from error
        self._loss.watch_server("control store", membership.control_store)
        if membership.raylet is not None:
            self._loss.watch_process("raylet", membership.raylet)
        return membership.places

    async def call(self, function: Callable[[], T]) -> T:
        """See ``Cluster``."""
        return await self._thread.call(function)

    async def wait_lost(self) -> str:
        """See ``Cluster``."""
        return await self._loss.wait()

    async def stop(self) -> None:
        """Leave the cluster; Ray ends whatever this process has started there. Idempotent."""
        self._loss.end()
        await self._thread.call(self._leave)
        self._thread.end()

    def abandon(self) -> None:
        """See ``Cluster``. The cluster ends our workers when this process is gone."""
        self._loss.end()
        self._thread.abandon()

    def _join(self, num_workers: int) -> _Membership:
        # Ray reads these when it is imported
        os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", str(_REQUEST_TIMEOUT_S))
        os.environ.update(
            RAY_USAGE_STATS_ENABLED="0",
            RAY_DEDUP_LOGS="0",
            RAY_DISABLE_FAILURE_SIGNAL_HANDLER="1",  # its handler of SIGTERM would replace ours
        )
        import ray

        address = self._find()
        is_protected = _prepare_token(address, self._name(address))
        try:
            context: Any = ray.init(address=self._address, log_to_driver=True, logging_level=40)
        except ConnectionError as error:
            raise TwinpoolError(
                f"the Ray cluster at {address} does not let us in: this machine must be one of its nodes (make it one with "
                f"'ray start --address={address}')"
            ) from error
        except RuntimeError as error:  # other versions of Ray or Python over there
            raise TwinpoolError(f"{self._name(address)} cannot be joined: {' '.join(str(error).split())}") from error
        self._is_joined = True
        nodes = [_node_of(entry) for entry in ray.nodes() if entry["Alive"]]  # type: ignore[no-untyped-call]
        places = find_worker_places(nodes, num_workers, host=node_address())
        return _Membership(
            places=dataclasses.replace(places, is_protected=is_protected),
            control_store=context.address_info["gcs_address"],
            raylet=_find_raylet(context.address_info["raylet_socket_name"]),
        )

    def _find(self) -> str:
        """HOST:PORT of the control store."""
        if self._address != AUTO:
            return self._address
        from ray._private.services import get_ray_address_from_environment

        try:
            address: str = get_ray_address_from_environment(AUTO, None)
        except ConnectionError as error:
            raise TwinpoolError(
                "--address auto finds no Ray cluster that this machine is a node of: 'ray start' makes it one"
            ) from error
        if "://" in address or not address.rpartition(":")[2].isdecimal():
            raise TwinpoolError(f"RAY_ADDRESS is {address!r}, but must be HOST:PORT of a Ray cluster")
        return address

    def _name(self, address: str) -> str:
        """What the user said that came to ``address``."""
        if self._address != AUTO:
            return f"--address {address}"
        if os.environ.get("RAY_ADDRESS") == address:
            return f"RAY_ADDRESS {address}"
        return f"{address}, which --address auto has found"

    def _leave(self) -> None:
        if self._is_joined:
            self._is_joined = False
            import ray

            ray.shutdown()


def _prepare_token(address: str, name: str) -> bool:
    """Have Ray send its token if the cluster asks for one, and else none. Returns whether it asks.

    Raises ``TwinpoolError`` when the two do not agree, or when nothing of Ray's answers at ``address``. Ray itself would try
    for minutes.
    """
    from ray._raylet import Config  # type: ignore[attr-defined]

    with grpc.insecure_channel(f"dns:///{address}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        is_open = _is_let_in(channel, name, {})
        if is_open:
            if (source := _token_source()) != _TOKEN_FILE:
                raise TwinpoolError(
                    f"{name} asks for no token, but {source} is set: unset it, or start the cluster with the same token"
                )
            os.environ["RAY_AUTH_MODE"] = "disabled"
        else:
            if not (header := _token_header()):
                raise TwinpoolError(
                    f"{name} asks for a token and {_token_source()} has none: set RAY_AUTH_TOKEN to the cluster's"
                )
            if not _is_let_in(channel, name, header):
                raise TwinpoolError(f"{name} refuses the token of {_token_source()}: set RAY_AUTH_TOKEN to the cluster's")
            os.environ.setdefault("RAY_AUTH_MODE", "token")
    Config.initialize("")  # or Ray would keep to what it read when it was imported
    return not is_open


def _is_let_in(channel: grpc.Channel, name: str, header: Mapping[str, str]) -> bool:
    """Whether Ray answers what comes with ``header``, rather than asking for another token."""
    get_cluster_id: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
    try:
        get_cluster_id(b"", timeout=_ANSWER_TIMEOUT_S, metadata=tuple(header.items()))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return False
        is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        why = f"it said nothing for {_ANSWER_TIMEOUT_S:g} s" if is_silent else error.details()
        raise TwinpoolError(f"no Ray cluster answers at {name}: {why}") from error
    return True


def _token_header() -> Mapping[str, str]:
    """Ray's token as Ray sends it; empty when there is none."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    try:
        header: Mapping[str, str] = AuthenticationTokenLoader.instance().get_token_for_http_header(ignore_auth_mode=True)
    except AuthenticationError:  # RAY_AUTH_TOKEN_PATH leads nowhere
        return {}
    return header


def _token_source() -> str:
    """Where Ray looks for its token."""
    return next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)), _TOKEN_FILE)


def _find_raylet(socket_name: str) -> int | None:
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and f"--raylet_socket_name={socket_name}" in (process.info["cmdline"] or ()):
            return process.pid
    return None


def _node_of(entry: Mapping[str, Any]) -> ClusterNode:
    resources = entry["Resources"]
    places = resources.get(WORKER_RESOURCE)
    return ClusterNode(
        num_cores=int(resources.get("CPU", 0)),
        num_places=None if places is None else int(places),
        num_gpus=int(resources.get("GPU", 0)) if torch_has_cuda(version("torch")) else 0,
    )
