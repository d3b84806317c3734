"""How a prompt's keys and values get into reserved pages: segments from elsewhere, or a loan to the prefill phase beside.

Whether a commit may follow is ``commit_check``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from decode_worker.decode_sequence import DecodeSequence, DecodeState, Reservation
from decode_worker.reservation_desk import ReservationDesk
from kv_transfer.page_transport import Segment
from llm_engine.page_pool import PagePool
from llm_engine.phase_counters import PhaseCounters
from serving_core.byte_stride import ByteStride
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import PageId
from serving_core.page_state import PageState
from serving_core.transfer_ticket import TransferTicket


class KVWriter(Protocol):
    """Where segments go: this worker's paged cache."""

    def write(self, page_id: PageId, offset: int, payload: memoryview, stride: ByteStride | None) -> None:
        """Copy ``payload`` into the page, ``offset`` bytes from its start: in one piece or in runs."""


class PageIntake:
    """The two ways in, of which a reservation takes one."""

    def __init__(self, *, desk: ReservationDesk, pool: PagePool, cache: KVWriter, counters: PhaseCounters) -> None:
        self._desk = desk
        self._pool = pool
        self._cache = cache
        self._counters = counters

    def accept(self, segments: Sequence[Segment]) -> None:
        """Copy segments of one reservation and attempt into its pages. Raises ``Refused`` and has then touched no page."""
        if not segments:
            return
        with self._counters.counting_refusals():
            reservation_id, attempt = segments[0].reservation_id, segments[0].attempt
            if any(segment.reservation_id != reservation_id or segment.attempt != attempt for segment in segments):
                raise Refused(RefusalCode.MALFORMED, "Segments that arrive together belong to one reservation and attempt.")
            sequence, reservation = self._desk.find(reservation_id, attempt)
            if reservation.is_lent:
                raise Refused(
                    RefusalCode.MALFORMED, f"The pages of {sequence.key} are being filled by this worker's own prefill phase."
                )
            # Sent again, once or after the commit: the ledger knows them, and decode's own keys stay untouched.
            segments = reservation.ledger.add(segments)
        self._fill(sequence, reservation)
        for segment in segments:
            page_id = reservation.page_ids[segment.page_ordinal]
            self._cache.write(page_id, segment.offset, segment.payload, segment.stride)
            self._counters.num_kv_bytes += segment.payload.nbytes

    def lend_pages(self, ticket: TransferTicket) -> tuple[PageId, ...]:
        """The reserved pages, for this worker's prefill phase to compute into, but for those that the ticket's cached tokens
        fill; valid until the engine thread's next call.

        Idempotent. Raises ``Refused`` like ``accept`` once the reservation does not stand any more.
        """
        with self._counters.counting_refusals():
            sequence, reservation = self._desk.find(ticket.reservation_id, ticket.attempt)
            if sequence.state is DecodeState.DECODING or reservation.ledger.num_bytes_received:
                raise Refused(
                    RefusalCode.MALFORMED, f"The ticket of {sequence.key} attempt {ticket.attempt} is redeemed already."
                )
        reservation.is_lent = True
        self._fill(sequence, reservation)
        return reservation.page_ids

    def _fill(self, sequence: DecodeSequence, reservation: Reservation) -> None:
        # As a whole: which of its pages has bytes is the ledger's knowledge, not the pool's.
        if not reservation.is_filling:
            reservation.is_filling = True
            self._pool.move(reservation.own_page_ids, sequence.owner, PageState.FILLING)
