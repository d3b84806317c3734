"""How pages are to travel from a prefill to a decode worker, as the user says it."""

from __future__ import annotations

from enum import StrEnum


class TransferWay(StrEnum):
    """``--transfer``. AUTO: through shared memory to each decode worker that can be reached so, else over torch.distributed
    from GPU to GPU, else over gRPC. TORCH_DISTRIBUTED: on any device, and over gRPC while it fails."""

    AUTO = "auto"
    GRPC = "grpc"
    SHARED_MEMORY = "shared_memory"
    TORCH_DISTRIBUTED = "torch_distributed"
