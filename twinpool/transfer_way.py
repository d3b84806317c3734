"""How pages are to travel from a prefill to a decode worker, as the user says it."""

from __future__ import annotations

from enum import StrEnum


class TransferWay(StrEnum):
    """``--transfer``. AUTO: through shared memory to each decode worker that can be reached so, else over gRPC."""

    AUTO = "auto"
    GRPC = "grpc"
    SHARED_MEMORY = "shared_memory"
