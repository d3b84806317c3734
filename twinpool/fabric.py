"""Whether torch.distributed may carry pages in a cluster. Its sockets ask nobody who he is, and a peer that breaks its protocol
can end a worker. So it is for networks on which there is nobody else.

*Protected* is a cluster that was joined and that asks for a token: whoever set it up expects strangers on its network. There
the user has to say that they do not reach the nodes. A server's own cluster is not: its workers listen on loopback, to torch's
sockets as to gRPC's, and anybody who could reach the ones could reach the others.
"""

from __future__ import annotations

from serving_core.errors import ConfigError
from twinpool.cluster import WorkerPlaces
from twinpool.serve_config import ServeConfig
from twinpool.transfer_way import TransferWay


def is_fabric_trusted(config: ServeConfig, places: WorkerPlaces) -> bool:
    """Whether it may. Raises ``ConfigError`` when it may not and the user has asked for it."""
    if not places.is_protected or config.trusts_fabric:
        return True
    if config.transfer is TransferWay.TORCH_DISTRIBUTED:
        raise ConfigError(
            "--transfer torch_distributed cannot tell who is at the other end, and the Ray cluster of "
            f"--address {config.address} asks for a token: add --trust-fabric if nobody else can reach its nodes, or use auto "
            "or grpc"
        )
    return False
