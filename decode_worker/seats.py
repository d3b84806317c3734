"""The sequences that hold pages, in order of admission: whether one more may, how one grows, and who makes room for it.

Decides and accounts; what an eviction means for the sequence, its reservation and its router is the phase's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from decode_worker.decode_sequence import DecodeSequence
from llm_engine.page_pool import PagePool
from serving_core.ids import SequenceKey
from serving_core.page_state import PageState
from serving_core.worker_status import PhaseName


class Seats:
    """At most ``max_num_seqs`` sequences with a reservation. Pages are the pool's, which may have other owners beside these.
    Cached pages are as good as free ones, and a page that is shared with one who is there already takes no room.

    The rules that together let every sequence end:

    * Who runs out of pages takes those of the youngest, be it itself. The oldest is never evicted: what it needs at its longest
      fits into the pool. So there is always one that gets on.
    * A sequence that comes back after evictions is reserved more each time (``AdmissionCheck``). One that is reserved what it
      needs at its longest waits until all who are older fit at their longest too, and is *settled*: nobody who is there can
      push it out, and whoever comes later is younger. So each is evicted a few times at most.
    * When pages still lack, they are with the prefill phase on the same pool, or with a step under way that writes them: either
      gives them back in a bounded time. So of those in a step one is evicted at a time.
    """

    def __init__(self, pool: PagePool, max_num_seqs: int) -> None:
        assert max_num_seqs >= 1
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._seated: dict[SequenceKey, DecodeSequence] = {}

    def __len__(self) -> int:
        return len(self._seated)

    def __iter__(self) -> Iterator[DecodeSequence]:
        """The oldest first. Sequences may leave meanwhile, and are then left out."""
        for sequence in tuple(self._seated.values()):
            if sequence.key in self._seated:
                yield sequence

    def is_room_for(self, sequence: DecodeSequence) -> bool:
        """Whether the first in line may be admitted now: a seat, its first pages, those that are another phase's turn, and room
        for the others to grow: one page for each of them that may, or all they can need where the sequence is to be settled."""
        growths = [seated.num_pages_to_grow for seated in self._seated.values()]
        num_kept_free = sum(growths) if sequence.is_to_settle else sum(growth > 0 for growth in growths)
        num_kept_free += self._pool.line.num_kept_from(PhaseName.DECODE, sequence.arrived_at)
        num_to_take = self._pool.num_to_take(sequence.num_first_pages, self._pool.find(sequence.page_hashes))
        has_room = num_to_take + num_kept_free <= self._pool.num_available
        return len(self._seated) < self._max_num_seqs and has_room

    def take(self, sequence: DecodeSequence) -> None:
        """Seat the sequence as the youngest."""
        assert sequence.key not in self._seated
        sequence.is_settled = sequence.is_to_settle
        self._seated[sequence.key] = sequence

    def leave(self, sequence: DecodeSequence) -> None:
        """Idempotent."""
        self._seated.pop(sequence.key, None)

    def grow(self, sequence: DecodeSequence, num_pages: int, evict: Callable[[DecodeSequence], None]) -> bool:
        """Give a decoding sequence ``num_pages`` in all, if it has fewer. ``evict`` ends a sequence and gives back its seat and
        pages. False when ``sequence`` cannot run this step, or had to go itself."""
        reservation = sequence.reservation
        assert reservation is not None
        num_missing = max(0, num_pages - len(reservation.page_ids))
        while num_missing > self._pool.num_available:
            youngest = next(reversed(self._seated.values()))
            if youngest.is_settled or len(self._seated) == 1:
                return False
            is_in_step = youngest.num_in_flight > 0
            evict(youngest)
            if youngest is sequence or (is_in_step and num_missing > self._pool.num_available):
                return False
        reservation.page_ids += self._pool.allocate(num_missing, sequence.owner, PageState.USED)
        return True
