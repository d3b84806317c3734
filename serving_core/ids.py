"""Identities that cross a border: distinct types, so that one cannot stand in for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

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

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice_index}"
