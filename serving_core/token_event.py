"""What a worker tells a router about one sequence, step by step."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from serving_core.ids import SequenceKey


class FinishReason(enum.Enum):
    """Why a sequence ended by its tokens; the values are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position, before temperature and truncation.

    ``top`` holds (token id, logprob) of the most likely tokens, most likely first, as many as were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One generated token.

    Invariants per (key, attempt): indexes are consecutive from 0, or from the last one of the log that the attempt began with;
    exactly one event, the last, carries a finish reason, and it is beyond the log.
    An end token is reported as a token like any other, with ``finish_reason`` STOP; the router keeps it out of the text.
    Index 0 may arrive twice, from prefill (the early copy) and from decode: same token, dropped by index. It alone tells
    ``num_cached_tokens``: those of the prompt that were not computed, since their keys and values were there.
    """

    key: SequenceKey
    attempt: int
    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


class FailureKind(enum.Enum):
    """Which side of a hand-off gave up on an attempt."""

    HANDOFF = 1
    """The pages could not be delivered; a new attempt may succeed."""
    LEASE_EXPIRED = 2
    """No router named the sequence for one lease."""
    INTERNAL = 3
    """The worker found its own state wrong; the sequence is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFailed:
    """An attempt that ended without a finish reason. Terminal for that attempt on that worker, which releases its
    pages; but after ``HANDOFF`` prefill may keep what it has computed for a new ticket, until released or for one lease."""

    key: SequenceKey
    attempt: int
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEvicted:
    """A decode worker that ran out of pages took those of this sequence for an older one. Terminal for that attempt on that
    worker, not for the request: another attempt goes on from the router's log."""

    key: SequenceKey
    attempt: int


SequenceEvent = TokenEvent | SequenceFailed | SequenceEvicted
