"""Identities that cross a border: distinct types, so that one cannot stand in for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from serving_core.errors import BrokenContract

MAX_ID_CHARS = 256

RequestId = NewType("RequestId", str)
"""One client request. Made by the router; a client's own X-Request-Id is echoed, never used as a key."""

WorkerId = NewType("WorkerId", str)
"""One place in a pool, for example ``decode-0``. Survives a restart of the process behind it."""

Incarnation = NewType("Incarnation", str)
"""One process behind a worker id: new at every start, so that a restarted worker is never mistaken for the old one."""

RouterId = NewType("RouterId", str)
"""One router process."""

ReservationId = NewType("ReservationId", str)
"""Pages that a decode worker holds for one sequence, whatever the attempt: 32 hexadecimal digits."""

PageId = NewType("PageId", int)
"""Index of a page in one worker's pool."""


@dataclass(frozen=True, slots=True, order=True)
class SequenceKey:
    """Names one sequence: the ``choice_index``-th answer (from 0) to ``request_id``."""

    request_id: RequestId
    choice_index: int = 0

    def __post_init__(self) -> None:
        check_id("request id", self.request_id)

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice_index}"


def check_id(what: str, value: str) -> None:
    """Raises ``BrokenContract`` for an id that is empty or longer than any of ours."""
    if not value:
        raise BrokenContract(f"the {what} is empty")
    if len(value) > MAX_ID_CHARS:
        raise BrokenContract(f"the {what} has {len(value)} characters but may have at most {MAX_ID_CHARS}")
