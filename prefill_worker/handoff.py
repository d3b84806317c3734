"""The two ways out of the prefill phase, as it sees them: pages pushed to another worker, or computed in place for this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serving_core.ids import PageId, WorkerId
from serving_core.token_event import TokenLogprobs
from serving_core.transfer_ticket import HandoffCommit, TransferTicket


class Handoff(Protocol):
    """One attempt's delivery to a decode worker. Its pages stay held until it has reported its end, also after ``cancel``.

    Called on the engine thread; nothing blocks. Whoever runs it calls ``PrefillPhase.handoff_ended`` exactly once.
    """

    def offer(self, pages: Sequence[tuple[int, PageId]]) -> None:
        """Send these (ordinal, page) of this worker: their bytes are final. Ordinals run on, without a gap, from the page with
        the first token that is not cached at the receiver."""

    def finish(self, token_id: int, logprobs: TokenLogprobs | None, *, num_cached_tokens: int = 0) -> None:
        """Every page was offered; commit with this token at output index 0. So many tokens of the prompt were not computed."""

    def cancel(self) -> None:
        """Give up. Idempotent."""


class LocalDecode(Protocol):
    """The decode phase beside this prefill phase, on the same pool and engine thread."""

    @property
    def worker_id(self) -> WorkerId:
        """Tickets of this worker go the local way."""

    def lend_pages(self, ticket: TransferTicket) -> tuple[PageId, ...]:
        """The pages reserved for the ticket, to be computed into during this step, but for those that its cached tokens fill.
        Idempotent; asked again before each step.

        Raises ``Refused`` once the reservation does not stand any more.
        """

    def commit(self, commit: HandoffCommit) -> None:
        """Take the sequence over. Raises ``Refused`` as for a commit from elsewhere."""
