"""One sequence on the decode side, from its reservation to its end. Data only; ``DecodePhase`` alone changes it."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.receive_ledger import ReceiveLedger
from llm_engine.page_hash import PageHash
from llm_engine.sample_template import SampleTemplate
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
    """The hand-off happened; waiting for the next step, with a log to replay or without."""
    ENDED = enum.auto()
    """Nothing is held any more."""


@dataclass(slots=True, kw_only=True, eq=False)
class Reservation:
    """Pages promised to one attempt of one sequence.

    ``page_ids`` cover the prompt from the start, and more as the sequence grows. The first ``num_verified_pages`` are complete
    and may be shared, so nobody writes into them any more: those that were cached when the ticket was issued, and with the
    commit the prompt's others but its last. The rest are ``own_page_ids``. ``is_lent``: this worker's own prefill phase
    computes straight into those. ``is_filling``: something was written into them, or may have been.
    """

    ticket: TransferTicket
    page_ids: tuple[PageId, ...]
    ledger: ReceiveLedger
    num_verified_pages: int = 0
    is_filling: bool = False
    is_lent: bool = False

    @property
    def verified_page_ids(self) -> tuple[PageId, ...]:
        return self.page_ids[: self.num_verified_pages]

    @property
    def own_page_ids(self) -> tuple[PageId, ...]:
        """Those that the sequence does not share."""
        return self.page_ids[self.num_verified_pages :]

    @property
    def reservation_id(self) -> ReservationId:
        return self.ticket.reservation_id


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeSequence:
    """``callers`` asked for this attempt's ticket and have not withdrawn. ``arrived_at`` is by the worker's clock.

    ``page_hashes``: what the prompt's pages will hold that may come from the prefix cache; none without one.
    ``num_first_pages`` are reserved before the hand-off, ``max_pages`` are what it needs at its longest. ``is_settled``: it was
    admitted so that it is never evicted (see ``Seats``). ``reservation`` is None exactly while waiting for pages.
    ``output_token_ids`` is empty until the commit and begins with the request's log then; keys and values of the first
    ``num_cached_outputs`` of them are cached. ``sample_template``, from the commit on, is how the rest of them are chosen.

    Steps under way, which were planned and not applied, compute ``num_in_flight`` further tokens and sample
    ``num_not_yet_known`` of them: one in the step before, when the next is planned.
    """

    request: GenerateRequest
    attempt: int
    router_id: RouterId
    num_evictions: int
    num_first_pages: int
    max_pages: int
    arrived_at: float
    page_hashes: tuple[PageHash, ...] = ()
    state: DecodeState = DecodeState.WAITING_FOR_PAGES
    callers: list[TicketAnswer] = field(default_factory=list)
    reservation: Reservation | None = None
    is_settled: bool = False
    output_token_ids: array[int] = field(default_factory=lambda: array("i"))
    sample_template: SampleTemplate | None = None
    num_cached_outputs: int = 0
    num_in_flight: int = 0
    num_not_yet_known: int = 0

    @property
    def key(self) -> SequenceKey:
        return self.request.key

    @property
    def owner(self) -> PageOwner:
        return PageOwner(key=self.request.key, attempt=self.attempt)

    @property
    def has_log(self) -> bool:
        """Its client has tokens already."""
        return bool(self.request.output_token_ids)

    @property
    def is_to_settle(self) -> bool:
        """Evicted so often that it is reserved all it can need."""
        return self.num_evictions > 0 and self.num_first_pages == self.max_pages

    @property
    def num_pages_to_grow(self) -> int:
        """Pages that it may yet take, once it has a reservation."""
        return self.max_pages - (len(self.reservation.page_ids) if self.reservation else 0)

    @property
    def num_planned_outputs(self) -> int:
        """Tokens of the answer whose keys and values are cached, or will be when the steps under way are over."""
        return self.num_cached_outputs + self.num_in_flight

    @property
    def num_pending(self) -> int:
        """Tokens of the answer that are to be computed: the newest, known or not, or more while a log is replayed."""
        return len(self.output_token_ids) + self.num_not_yet_known - self.num_planned_outputs

    def answer_callers(self, refused: Refused) -> None:
        """Tell those who still wait for a ticket that none will come."""
        if self.state is DecodeState.WAITING_FOR_PAGES:
            for answer in self.callers:
                answer(refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUnderWay:
    """A row of a step that was planned and not applied. ``owner`` has a claim of the step's own on the pages that it writes."""

    sequence: DecodeSequence
    owner: PageOwner
    written_page_ids: tuple[PageId, ...]
