"""The page paths of one worker: over which transports it sends, and on which it listens. Composes them; moves nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import grpc.aio

from kv_transfer.fallback_transport import FallbackTransport
from kv_transfer.grpc_page_service import GrpcPageService
from kv_transfer.grpc_page_transport import GrpcPageTransport
from kv_transfer.hold_off import HoldOff
from kv_transfer.page_socket import is_supported
from kv_transfer.page_transport import PageSink, PageTransport
from kv_transfer.pair_group import missing_backend
from kv_transfer.shared_memory_page_service import SharedMemoryPageService
from kv_transfer.shared_memory_page_transport import SharedMemoryPageTransport
from kv_transfer.torch_distributed_page_service import TorchDistributedPageService
from kv_transfer.torch_distributed_page_transport import TorchDistributedPageTransport
from serving_core.clock import Clock
from serving_core.errors import ConfigError, RefusalCode
from serving_core.ids import Incarnation
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from twinpool.transfer_way import TransferWay

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlace:
    """What decides over which paths a worker's pages may travel: the way that was asked for, ``host``, its own address,
    ``device``, where its pages lie in torch's words, and whether torch.distributed may be used (see ``fabric``)."""

    way: TransferWay
    host: str
    device: str
    is_fabric_trusted: bool

    @property
    def uses_shared_memory(self) -> bool:
        """Raises ``ConfigError`` for a way that this system does not have."""
        if self.way is TransferWay.SHARED_MEMORY and not is_supported():
            raise ConfigError("--transfer shared_memory needs Linux: use auto or grpc")
        return self.way in (TransferWay.AUTO, TransferWay.SHARED_MEMORY) and is_supported()

    @property
    def uses_torch_distributed(self) -> bool:
        """Raises ``ConfigError`` for a way that this torch does not have."""
        if self.way is TransferWay.TORCH_DISTRIBUTED and (missing := missing_backend(self.device)):
            raise ConfigError(f"--transfer torch_distributed needs a torch with {missing}: use auto or grpc")
        return self.way is TransferWay.TORCH_DISTRIBUTED or (self.way is TransferWay.AUTO and not self.why_no_torch_distributed)

    @property
    def why_no_torch_distributed(self) -> str:
        """A sentence on why ``auto`` leaves it out, empty when it does not."""
        if not self.device.startswith("cuda"):
            return "Over torch_distributed auto sends from GPU to GPU only, and this worker's pages are in host memory."
        if not self.is_fabric_trusted:
            return "Over torch_distributed auto sends on protected clusters with --trust-fabric only."
        if missing := missing_backend(self.device):
            return f"This torch has no {missing}."
        return ""


def make_transport(place: PagePlace, clock: Clock, token: ClusterToken = OPEN) -> FallbackTransport:
    """The sending end, which shows ``token`` to receivers. Raises ``ConfigError`` for a way that this system does not have."""
    transports: list[PageTransport] = []
    if place.uses_shared_memory:
        transports.append(SharedMemoryPageTransport(token=token))
    if place.uses_torch_distributed:
        transports.append(TorchDistributedPageTransport(place.host, device=place.device, hold_off=HoldOff(clock), token=token))
    if place.way is not TransferWay.SHARED_MEMORY:
        transports.append(GrpcPageTransport(token=token))
    is_auto = place.way is TransferWay.AUTO
    return FallbackTransport(transports, left_out=place.why_no_torch_distributed if is_auto else "")


class PageServices:
    """The receiving ends, in front of one sink. gRPC is always there, so that the sender alone decides. What is not ``server``
    asks senders for ``token`` itself."""

    def __init__(self, sink: PageSink, *, place: PagePlace, server: grpc.aio.Server, token: ClusterToken = OPEN) -> None:
        self._place = place
        self._grpc = GrpcPageService(sink)
        self._grpc.add_to_server(server)
        self._shared_memory = SharedMemoryPageService(sink, token=token) if place.uses_shared_memory else None
        self._torch_distributed = None
        if place.uses_torch_distributed:
            self._torch_distributed = TorchDistributedPageService(sink, device=place.device)
            self._torch_distributed.add_to_server(server)

    @property
    def num_refused_writes(self) -> Mapping[RefusalCode, int]:
        """Streams ended by a refusal, by its code, of all page paths. Only grows."""
        refused = Counter(self._grpc.num_refused_writes)
        for service in (self._shared_memory, self._torch_distributed):
            if service is not None:
                refused.update(service.num_refused_writes)
        return refused

    def start(self, address: str, incarnation: Incarnation) -> None:
        """Listen for senders; gRPC's server is started by its owner.

        Raises ``ConfigError`` when shared memory cannot be and there is to be no other way.
        """
        if self._torch_distributed is not None:
            self._torch_distributed.start(address, incarnation)
        if self._shared_memory is None:
            return
        try:
            self._shared_memory.start(address, incarnation)
        except OSError as error:
            if self._place.way is TransferWay.SHARED_MEMORY:
                raise ConfigError(f"--transfer shared_memory cannot work here ({error.strerror}): use auto or grpc") from error
            _log.warning("no pages are taken over shared memory: %s", error.strerror)

    async def close(self) -> None:
        """Stop listening to senders, except over gRPC itself, whose server's end does that. Idempotent."""
        if self._shared_memory is not None:
            await self._shared_memory.close()
        if self._torch_distributed is not None:
            await self._torch_distributed.close()
