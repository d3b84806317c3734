"""One sequence on the decode side, from its reservation to its end. Data only; ``DecodePhase`` alone changes it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.receive_ledger import ReceiveLedger
from serving_core.errors import Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import PageId, ReservationId, RouterId, SequenceKey
from serving_core.page_state import PageOwner
from serving_core.transfer_ticket import TransferTicket

TicketAnswer = Callable[[TransferTicket | Refused], None]
"""Takes a caller's answer, on the engine thread; never blocks and never raises."""


class DecodeState(enum.Enum):
    """What a sequence waits for. It goes down this list; a higher attempt takes it back to WAITING_FOR_COMMIT."""

    WAITING_FOR_PAGES = enum.auto()
    """In the waiting list, without a page."""
    WAITING_FOR_COMMIT = enum.auto()
    """Pages are reserved, a ticket is out, segments arrive."""
    DECODING = enum.auto()
    """The hand-off happened; waiting for the next step."""
    ENDED = enum.auto()
    """Nothing is held any more."""


@dataclass(slots=True, kw_only=True, eq=False)
class Reservation:
    """Pages promised to one attempt of one sequence.

    ``page_ids`` cover the sequence at its longest. ``is_lent``: this worker's own prefill phase computes straight into them.
    ``is_filling``: something was written, or may have been.
    """

    ticket: TransferTicket
    page_ids: tuple[PageId, ...]
    ledger: ReceiveLedger
    is_filling: bool = False
    is_lent: bool = False

    @property
    def reservation_id(self) -> ReservationId:
        return self.ticket.reservation_id


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeSequence:
    """``callers`` asked for this attempt's ticket and have not withdrawn; ``num_pages`` is the worst case to be reserved.

    ``reservation`` is None exactly while waiting for pages. ``output_token_ids`` is empty until the commit.
    """

    request: GenerateRequest
    attempt: int
    router_id: RouterId
    num_pages: int
    state: DecodeState = DecodeState.WAITING_FOR_PAGES
    callers: list[TicketAnswer] = field(default_factory=list)
    reservation: Reservation | None = None
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def key(self) -> SequenceKey:
        return self.request.key

    @property
    def owner(self) -> PageOwner:
        return PageOwner(key=self.request.key, attempt=self.attempt)
