"""The pages prompts are computed into: this phase's own, taken in turn, or those lent by the decode phase on the same pool.

With a prefix cache, prompts share the pages that they begin with, if one of them has computed them. Whether a prompt waits in
line depends only on the pages that it would take from others.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm_engine.page_hash import PageHash, num_cacheable_pages, page_hashes
from llm_engine.page_pool import PagePool
from prefill_worker.handoff import LocalDecode
from prefill_worker.prefill_sequence import PrefillSequence
from serving_core.generate_request import GenerateRequest
from serving_core.kv_page_layout import KVPageLayout
from serving_core.page_state import PageState
from serving_core.worker_status import PhaseName


class PromptPages:
    """``pool`` has pages of ``layout``; ``local_decode`` is the decode phase mounted on it, if there is one."""

    def __init__(
        self, pool: PagePool, layout: KVPageLayout, local_decode: LocalDecode | None, *, has_prefix_cache: bool
    ) -> None:
        self.has_prefix_cache = has_prefix_cache
        self._pool = pool
        self._layout = layout
        self._local_decode = local_decode

    def hashes_of(self, request: GenerateRequest) -> tuple[PageHash, ...]:
        """What the prompt's full pages will hold; nothing without a prefix cache."""
        if not self.has_prefix_cache:
            return ()
        return page_hashes(request.prompt_token_ids, page_size=self._layout.page_size, salt=request.cache_salt)

    def take(self, sequence: PrefillSequence) -> bool:
        """Give a prompt that waits its pages. False when they are not to be had now, or are another's turn."""
        if sequence.is_local:
            return True
        line = self._pool.line
        num_pages = self._layout.num_pages_for(sequence.request.num_prompt_tokens)
        found = self._pool.find(self._cacheable(sequence))
        num_to_take = self._pool.num_to_take(num_pages, found)
        num_kept = line.num_kept_from(PhaseName.PREFILL, sequence.arrived_at)
        if num_to_take + num_kept > self._pool.num_available:
            line.wait(PhaseName.PREFILL, num_to_take, sequence.arrived_at)
            return False
        line.leave(PhaseName.PREFILL)
        self._pool.adopt(found, sequence.owner)
        fresh = self._pool.allocate(num_pages - len(found), sequence.owner, PageState.USED)
        sequence.page_ids = found + fresh
        sequence.start_behind(len(found) * self._layout.page_size)
        return True

    def is_coming(self, sequence: PrefillSequence, started: Sequence[PrefillSequence]) -> bool:
        """Whether one of those that have started will fill the first page that this prompt lacks. Their pages are shared once
        they are full; to start at once would be to compute them twice."""
        if sequence.is_local:
            return False
        hashes = self._cacheable(sequence)
        first = len(self._pool.find(hashes))
        return first < len(hashes) and any(
            other.page_hashes[first : first + 1] == hashes[first : first + 1]
            and other.num_computed < (first + 1) * self._layout.page_size
            for other in started
            if not other.is_local
        )

    def publish(self, sequence: PrefillSequence) -> None:
        """Let other prompts share the full pages that are computed. Lent ones are decode's, which publishes them itself."""
        if not sequence.is_local:
            num_full = min(sequence.num_computed // self._layout.page_size, len(sequence.page_hashes))
            self._pool.publish(sequence.page_hashes[:num_full], sequence.page_ids[:num_full], sequence.owner)

    def distrust(self, sequence: PrefillSequence) -> None:
        """Something went wrong in these pages: nobody else begins with them."""
        self._pool.forget(sequence.page_ids)

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

    def _cacheable(self, sequence: PrefillSequence) -> tuple[PageHash, ...]:
        """Of the pages that the prompt may begin with."""
        return sequence.page_hashes[: num_cacheable_pages(sequence.request.num_prompt_tokens, self._layout.page_size)]
