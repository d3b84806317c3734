"""The two messages that frame a hand-off: the decode worker's promise and the prefill worker's claim."""

from __future__ import annotations

import re
from dataclasses import dataclass

from serving_core.errors import BrokenContract
from serving_core.ids import Incarnation, ReservationId, SequenceKey, WorkerId, check_id
from serving_core.kv_page_layout import KVPageLayout
from serving_core.peer_address import check_address
from serving_core.token_event import TokenLogprobs

MAX_LEASE_S = 3600.0

_RESERVATION_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTicket:
    """A decode worker's promise to take one sequence's pages. Redeemed at most once per attempt.

    The prefill worker sends pages ``first_page .. num_prompt_pages - 1`` of the sequence (ordinals, not pool indices: the
    receiver alone knows where they go), where ``first_page = num_cached_tokens // layout.page_size``.

    Invariants: ``attempt >= 1``; ``reservation_id`` is 32 hexadecimal digits; ``num_cached_tokens`` is a multiple of the page
    size and at most ``num_prompt_tokens - 1``. ``lease_s``, above 0 and at most ``MAX_LEASE_S``, is a duration by its owner's
    clock; ``decode_address`` is HOST:PORT.
    """

    reservation_id: ReservationId
    key: SequenceKey
    attempt: int
    decode_worker_id: WorkerId
    decode_incarnation: Incarnation
    decode_address: str
    layout: KVPageLayout
    num_prompt_tokens: int
    num_cached_tokens: int
    lease_s: float

    def __post_init__(self) -> None:
        _check_claim(self.reservation_id, self.attempt)
        check_id("decode worker's id", self.decode_worker_id)
        check_id("decode worker's incarnation", self.decode_incarnation)
        check_address(self.decode_address)
        if not 0 < self.lease_s <= MAX_LEASE_S:
            raise BrokenContract(f"the lease is {self.lease_s:g} s but must be above 0 and at most {MAX_LEASE_S:g} s")
        if not 0 <= self.num_cached_tokens < self.num_prompt_tokens or self.num_cached_tokens % self.layout.page_size:
            raise BrokenContract(
                f"{self.num_cached_tokens} cached tokens of {self.num_prompt_tokens} are not whole pages of "
                f"{self.layout.page_size} that leave one token"
            )

    @property
    def first_page(self) -> int:
        return self.num_cached_tokens // self.layout.page_size

    @property
    def num_prompt_pages(self) -> int:
        return self.layout.num_pages_for(self.num_prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffCommit:
    """The prefill worker's claim that every page of one attempt was sent, with the token it sampled at output index 0.

    Idempotent by (reservation, attempt): the same commit gets the same answer, another token is refused and counted.
    ``num_cached_tokens`` of the prompt were not computed by the prefill worker, which had their keys and values.
    Invariants: ``attempt >= 1``; ``reservation_id`` is 32 hexadecimal digits.
    """

    reservation_id: ReservationId
    key: SequenceKey
    attempt: int
    token_id: int
    logprobs: TokenLogprobs | None
    num_bytes_sent: int
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        _check_claim(self.reservation_id, self.attempt)


def _check_claim(reservation_id: str, attempt: int) -> None:
    if not _RESERVATION_ID.fullmatch(reservation_id):
        raise BrokenContract(f"the reservation id is {reservation_id[:40]!r} but must be 32 hexadecimal digits")
    if attempt < 1:
        raise BrokenContract(f"attempt {attempt} is below 1")
