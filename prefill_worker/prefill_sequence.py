"""One sequence on the prefill side, from its admission to its hand-off. Data only; ``PrefillPhase`` alone changes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from llm_engine.page_hash import PageHash
from llm_engine.step_plan import SampledToken
from prefill_worker.handoff import Handoff
from serving_core.generate_request import GenerateRequest
from serving_core.ids import PageId, RouterId, SequenceKey
from serving_core.page_state import PageOwner
from serving_core.transfer_ticket import TransferTicket


class PrefillState(enum.Enum):
    """What a sequence waits for."""

    WAITING_FOR_PAGES = enum.auto()
    """In the queue; nothing is computed."""
    WAITING_FOR_STEP = enum.auto()
    """Pages are held, the next chunk is due."""
    WAITING_FOR_DECODE = enum.auto()
    """All is computed and offered; the decode worker has not acknowledged."""
    WAITING_FOR_ROUTER = enum.auto()
    """The way to the decode worker ended; what is computed is kept for a new ticket."""
    ENDED = enum.auto()
    """No longer wanted; its pages go as soon as no hand-off reads them."""


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillSequence:
    """``page_ids`` cover the prompt and are this phase's own, or the decode phase's on the local path (``is_local``).

    ``handoff`` delivers the newest attempt, None on the local path. ``open_attempts``: attempts whose hand-off has not reported
    its end and so may still read the pages. ``first_token`` is output index 0 once it is known; it is never sampled again.
    ``arrived_at``, by the worker's clock, is when it was admitted. ``num_offered`` counts pages given to ``handoff``, from
    ordinal 0, those it does not send included. ``page_hashes`` are those of the prompt's full pages, none without a prefix
    cache; ``num_cached_tokens`` of it were there when it got its pages, and are not computed.
    """

    request: GenerateRequest
    ticket: TransferTicket
    router_id: RouterId
    handoff: Handoff | None
    arrived_at: float
    page_hashes: tuple[PageHash, ...] = ()
    state: PrefillState = PrefillState.WAITING_FOR_PAGES
    page_ids: tuple[PageId, ...] = ()
    num_cached_tokens: int = 0
    num_computed: int = 0
    num_offered: int = 0
    first_token: SampledToken | None = None
    open_attempts: set[int] = field(default_factory=set)

    @property
    def key(self) -> SequenceKey:
        return self.request.key

    @property
    def attempt(self) -> int:
        return self.ticket.attempt

    @property
    def owner(self) -> PageOwner:
        return PageOwner(key=self.key, attempt=self.attempt)

    @property
    def is_local(self) -> bool:
        return self.handoff is None

    def start_behind(self, num_cached_tokens: int) -> None:
        """So many tokens need not be computed. They count as computed."""
        self.num_cached_tokens = self.num_computed = num_cached_tokens

    @property
    def num_remaining(self) -> int:
        """Prompt tokens still to be computed."""
        return self.request.num_prompt_tokens - self.num_computed
