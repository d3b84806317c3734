"""The calls of a router to one worker process, whatever carries them."""

from __future__ import annotations

from typing import Protocol

from serving_core.generate_request import GenerateRequest
from serving_core.ids import SequenceKey
from serving_core.page_state import PagesSnapshot
from serving_core.transfer_ticket import TransferTicket
from serving_core.worker_status import PhaseName


class WorkerCalls(Protocol):
    """What a router asks of one worker process. Every call bounds its own time and raises ``Refused`` or ``WorkerLost``."""

    async def reserve(self, request: GenerateRequest, attempt: int, *, num_evictions: int) -> TransferTicket:
        """Reserve decode pages for the prompt, the log and some growth, the more the more often it was evicted."""

    async def start(self, request: GenerateRequest, ticket: TransferTicket) -> None:
        """Queue the prompt for prefill."""

    async def release(self, phase: PhaseName, key: SequenceKey, attempt: int) -> None:
        """End the sequence in that phase, up to ``attempt``; a no-op for what the worker does not hold."""

    async def pages(self, *, is_summary: bool, timeout_s: float) -> PagesSnapshot:
        """A live picture of the worker's page pool."""

    async def close(self) -> None:
        """Give the connection up: calls under way get a moment to end and then raise ``WorkerLost``, new ones do at once.
        Idempotent."""
