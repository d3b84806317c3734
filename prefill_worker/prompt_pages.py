"""The pages prompts are computed into: this phase's own, taken in turn, or those lent by the decode phase on the same pool."""

from __future__ import annotations

from llm_engine.page_pool import PagePool
from prefill_worker.handoff import LocalDecode
from prefill_worker.prefill_sequence import PrefillSequence
from serving_core.kv_page_layout import KVPageLayout
from serving_core.page_state import PageState
from serving_core.worker_status import PhaseName


class PromptPages:
    """``pool`` has pages of ``layout``; ``local_decode`` is the decode phase mounted on it, if there is one."""

    def __init__(self, pool: PagePool, layout: KVPageLayout, local_decode: LocalDecode | None) -> None:
        self._pool = pool
        self._layout = layout
        self._local_decode = local_decode

    def take(self, sequence: PrefillSequence) -> bool:
        """Give a prompt that waits its pages. False when they are not to be had now, or are another's turn."""
        if sequence.is_local:
            return True
        line, num_pages = self._pool.line, self._layout.num_pages_for(sequence.request.num_prompt_tokens)
        num_kept = line.num_kept_from(PhaseName.PREFILL, sequence.arrived_at)
        if num_pages + num_kept > self._pool.num_free:
            line.wait(PhaseName.PREFILL, num_pages, sequence.arrived_at)
            return False
        line.leave(PhaseName.PREFILL)
        sequence.page_ids = self._pool.allocate(num_pages, sequence.owner, PageState.USED)
        return True

    def borrow(self, sequence: PrefillSequence) -> None:
        """The lent pages, to be asked for before each step, since a call in between may have released the reservation or given
        it to a higher attempt. Raises ``Refused`` once it does not stand any more."""
        if sequence.is_local:
            assert self._local_decode is not None
            sequence.page_ids = self._local_decode.lend_pages(sequence.ticket)

    def leave_line(self, sequence: PrefillSequence) -> None:
        """The prompt waits no more."""
        if not sequence.page_ids:
            self._pool.line.leave(PhaseName.PREFILL)

    def release_unread(self, sequence: PrefillSequence) -> None:
        """Give back the phase's own pages, unless a hand-off may still read them. Idempotent."""
        if sequence.open_attempts or sequence.is_local:
            return
        self._pool.release(sequence.page_ids, sequence.owner)
        sequence.page_ids = ()
