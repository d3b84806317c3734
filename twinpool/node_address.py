"""The address under which the rest of the cluster reaches this process."""

from __future__ import annotations


def node_address() -> str:
    """What Ray knows this node by: 127.0.0.1 in a cluster of our own. Only once this process has joined a cluster."""
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
