"""Which reservation stands in which attempt: issues tickets, is the fence, and remembers for one lease how things ended.

Holds no page and grants none; the phase does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decode_worker.decode_sequence import DecodeSequence, Reservation
from kv_transfer.receive_ledger import ReceiveLedger
from serving_core.clock import Clock
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import Incarnation, PageId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVPageLayout
from serving_core.recent_endings import RecentEndings
from serving_core.transfer_ticket import TransferTicket

_MAX_ENDINGS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a reservation ended. ``token_id`` is the committed one, None when it ended before; the refusal then says why."""

    attempt: int
    token_id: int | None
    code: RefusalCode
    message: str


class ReservationDesk:
    """The reservations of one decode worker. ``address`` is where prefill workers reach it."""

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        address: str,
        layout: KVPageLayout,
        lease_s: float,
        clock: Clock,
        new_reservation_id: Callable[[], ReservationId],
    ) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._address = address
        self._layout = layout
        self._lease_s = lease_s
        self._clock = clock
        self._new_reservation_id = new_reservation_id
        self._sequences: dict[ReservationId, DecodeSequence] = {}
        self._endings: RecentEndings[ReservationId, Ending] = RecentEndings(keep_s=lease_s, max_entries=_MAX_ENDINGS)
        self._ended_attempts: RecentEndings[SequenceKey, int] = RecentEndings(keep_s=lease_s, max_entries=_MAX_ENDINGS)

    def __len__(self) -> int:
        """Reservations that stand."""
        return len(self._sequences)

    def issue(self, sequence: DecodeSequence, page_ids: tuple[PageId, ...], *, num_verified_pages: int = 0) -> TransferTicket:
        """A ticket for the sequence's attempt: what its first pages hold already need not be sent. All else that was promised
        or received for a lower attempt is void with it."""
        held = sequence.reservation
        reservation_id = held.reservation_id if held else self._new_reservation_id()
        ticket = TransferTicket(
            reservation_id=reservation_id,
            key=sequence.key,
            attempt=sequence.attempt,
            decode_worker_id=self._worker_id,
            decode_incarnation=self._incarnation,
            decode_address=self._address,
            layout=self._layout,
            num_prompt_tokens=sequence.request.num_prompt_tokens,
            num_cached_tokens=num_verified_pages * self._layout.page_size,
            lease_s=self._lease_s,
        )
        ledger = ReceiveLedger(self._layout, ticket.first_page, ticket.num_prompt_pages - ticket.first_page)
        sequence.reservation = Reservation(
            ticket=ticket, page_ids=page_ids, ledger=ledger, num_verified_pages=num_verified_pages
        )
        self._sequences[reservation_id] = sequence
        return ticket

    def find(self, reservation_id: ReservationId, attempt: int) -> tuple[DecodeSequence, Reservation]:
        """What is held for exactly this attempt. Raises ``Refused``: STALE_ATTEMPT, or how the reservation ended."""
        sequence = self._sequences.get(reservation_id)
        ending = self._endings.get(reservation_id, self._clock.now())
        newest = sequence.attempt if sequence else ending.attempt if ending else 0
        if attempt < newest:
            raise Refused(
                RefusalCode.STALE_ATTEMPT, f"Attempt {attempt} of reservation {reservation_id} gave way to attempt {newest}."
            )
        if sequence is not None and sequence.reservation is not None and attempt == newest:
            return sequence, sequence.reservation
        if ending is not None and attempt == ending.attempt:
            raise Refused(ending.code, ending.message)
        raise Refused(
            RefusalCode.UNKNOWN_RESERVATION,
            f"Decode worker {self._worker_id} has issued no reservation {reservation_id} in attempt {attempt}.",
        )

    def ended_token_id(self, reservation_id: ReservationId, attempt: int) -> int | None:
        """The committed token of an attempt that has ended since; None where there is none or it is forgotten."""
        ending = self._endings.get(reservation_id, self._clock.now())
        return ending.token_id if ending is not None and ending.attempt == attempt else None

    def ended_attempt(self, key: SequenceKey) -> int:
        """The newest attempt that has ended here, 0 for none."""
        return self._ended_attempts.get(key, self._clock.now()) or 0

    def remember_end(self, sequence: DecodeSequence, code: RefusalCode, message: str, *, fence: int) -> None:
        """Keep for one lease how the sequence ended; attempts up to ``fence`` are over with it."""
        now = self._clock.now()
        if sequence.reservation is not None:
            token_id = sequence.output_token_ids[0] if sequence.output_token_ids else None
            ending = Ending(attempt=sequence.attempt, token_id=token_id, code=code, message=message)
            self._endings.remember(sequence.reservation.reservation_id, ending, now)
        self._ended_attempts.remember(sequence.key, max(sequence.attempt, fence), now)

    def close(self, sequence: DecodeSequence) -> None:
        """The sequence's reservation stands no more. Idempotent."""
        if sequence.reservation is not None:
            self._sequences.pop(sequence.reservation.reservation_id, None)
