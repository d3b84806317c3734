"""The page paths of one worker: over which transports it sends, and on which it listens. Composes them; moves nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import grpc.aio

from kv_transfer.fallback_transport import FallbackTransport
from kv_transfer.grpc_page_service import GrpcPageService
from kv_transfer.grpc_page_transport import GrpcPageTransport
from kv_transfer.page_socket import is_supported
from kv_transfer.page_transport import PageSink, PageTransport
from kv_transfer.shared_memory_page_service import SharedMemoryPageService
from kv_transfer.shared_memory_page_transport import SharedMemoryPageTransport
from serving_core.errors import ConfigError, RefusalCode
from serving_core.ids import Incarnation
from twinpool.transfer_way import TransferWay

_log = logging.getLogger(__name__)


def make_transport(way: TransferWay) -> FallbackTransport:
    """The sending end. Raises ``ConfigError`` for a way that this system does not have."""
    transports: list[PageTransport] = []
    if _uses_shared_memory(way):
        transports.append(SharedMemoryPageTransport())
    if way is not TransferWay.SHARED_MEMORY:
        transports.append(GrpcPageTransport())
    return FallbackTransport(transports)


class PageServices:
    """The receiving ends, in front of one sink. gRPC is always there, so that the sender alone decides."""

    def __init__(self, sink: PageSink, *, way: TransferWay, server: grpc.aio.Server) -> None:
        self._way = way
        self._grpc = GrpcPageService(sink)
        self._grpc.add_to_server(server)
        self._shared_memory = SharedMemoryPageService(sink) if _uses_shared_memory(way) else None

    @property
    def num_refused_writes(self) -> Mapping[RefusalCode, int]:
        """Streams ended by a refusal, by its code, of all page paths. Only grows."""
        refused = Counter(self._grpc.num_refused_writes)
        if self._shared_memory is not None:
            refused.update(self._shared_memory.num_refused_writes)
        return refused

    def start(self, address: str, incarnation: Incarnation) -> None:
        """Listen for senders on this host; gRPC's server is started by its owner.

        Raises ``ConfigError`` when that cannot be and there is to be no other way.
        """
        if self._shared_memory is None:
            return
        try:
            self._shared_memory.start(address, incarnation)
        except OSError as error:
            if self._way is TransferWay.SHARED_MEMORY:
                raise ConfigError(f"--transfer shared_memory cannot work here ({error.strerror}): use auto or grpc") from error
            _log.warning("no pages are taken over shared memory: %s", error.strerror)

    async def close(self) -> None:
        """Stop listening to senders on this host. Idempotent."""
        if self._shared_memory is not None:
            await self._shared_memory.close()


def _uses_shared_memory(way: TransferWay) -> bool:
    if way is TransferWay.SHARED_MEMORY and not is_supported():
        raise ConfigError("--transfer shared_memory needs Linux: use auto or grpc")
    return way is not TransferWay.GRPC and is_supported()
