"""The delta: pages that a prompt begins with and that are here already, so that prefill need not send them.

1. ``pin``, with the ticket: what the index knows of the prompt belongs to the sequence too, until it ends.
2. ``publish_prompt``, once the commit is verified: its other pages may be shared as well.
3. ``publish_all``, at its end: all that is complete, so that the next turn finds prompt and answer.
"""

from __future__ import annotations

from decode_worker.decode_sequence import DecodeSequence
from llm_engine.page_hash import PageHash, num_cacheable_pages, page_hashes
from llm_engine.page_pool import PagePool
from llm_engine.phase_counters import PhaseCounters
from serving_core.generate_request import GenerateRequest
from serving_core.ids import PageId


class PromptPrefix:
    """One decode phase's use of its pool's prefix index. When it is not enabled, nothing is known and nothing is entered."""

    def __init__(self, pool: PagePool, counters: PhaseCounters, *, is_enabled: bool) -> None:
        self._pool = pool
        self._counters = counters
        self._is_enabled = is_enabled

    def hashes_of(self, request: GenerateRequest) -> tuple[PageHash, ...]:
        """What those pages of the prompt will hold that may be cached: all but the one with its last token."""
        if not self._is_enabled:
            return ()
        num_pages = num_cacheable_pages(request.num_prompt_tokens, self._pool.page_size)
        token_ids = request.prompt_token_ids[: num_pages * self._pool.page_size]
        return page_hashes(token_ids, page_size=self._pool.page_size, salt=request.cache_salt)

    def pin(self, sequence: DecodeSequence) -> tuple[PageId, ...]:
        """The pages that the prompt begins with, as far as they are here; the sequence owns them from now on."""
        found = self._pool.find(sequence.page_hashes)
        self._pool.adopt(found, sequence.owner)
        if self._is_enabled:
            self._counters.num_prefix_queries += sequence.request.num_prompt_tokens
            self._counters.num_prefix_hits += len(found) * self._pool.page_size
        return found

    def publish_prompt(self, sequence: DecodeSequence) -> None:
        """The commit is verified: nobody writes any more into the prompt's pages but its last, which the answer goes on in, or
        which a higher attempt has sent again."""
        reservation = sequence.reservation
        assert reservation is not None
        reservation.num_verified_pages = len(sequence.page_hashes)
        self._pool.publish(sequence.page_hashes, reservation.verified_page_ids, sequence.owner)

    def publish_all(self, sequence: DecodeSequence) -> None:
        """The sequence ends after its commit: whatever page is full stays for others, the answer's too."""
        reservation = sequence.reservation
        if not self._is_enabled or reservation is None:
            return
        token_ids = (*sequence.request.prompt_token_ids, *sequence.output_token_ids[: sequence.num_cached_outputs])
        salt = sequence.request.cache_salt
        hashes = page_hashes(token_ids, page_size=self._pool.page_size, salt=salt, known=sequence.page_hashes)
        self._pool.publish(hashes, reservation.page_ids[: len(hashes)], sequence.owner)

    def distrust(self, sequence: DecodeSequence) -> None:
        """Something went wrong in the sequence's pages: nobody else begins with them."""
        if sequence.reservation is not None:
            self._pool.forget(sequence.reservation.page_ids)
