"""Leases of one phase: until when each sequence is wanted, by the owner's clock. Knows no page and no router.

A lease is granted with the sequence and extended only when a router names it; nothing else renews it, page writes least of all.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from serving_core.ids import SequenceKey


class LeaseTable:
    """Deadlines by sequence. Every call costs the logarithm of the table or less, so it can be asked at every step."""

    def __init__(self, lease_s: float) -> None:
        assert lease_s > 0
        self.lease_s = lease_s
        self._deadlines: dict[SequenceKey, float] = {}
        # Each lease has an entry whose time is a lower bound of its deadline: a renewal leaves it, it is corrected when due.
        self._bounds: list[tuple[float, SequenceKey]] = []

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._deadlines

    def grant(self, key: SequenceKey, now: float) -> None:
        """Begin a lease, or begin it anew."""
        is_known = key in self._deadlines
        self._deadlines[key] = now + self.lease_s
        if not is_known:
            heapq.heappush(self._bounds, (now + self.lease_s, key))

    def renew(self, keys: Iterable[SequenceKey], now: float) -> None:
        """Extend the leases of those of ``keys`` that are held; others are ignored and create no state."""
        for key in keys:
            if key in self._deadlines:
                self._deadlines[key] = now + self.lease_s

    def drop(self, key: SequenceKey) -> None:
        """End a lease without its having expired. Idempotent."""
        self._deadlines.pop(key, None)

    def expired(self, now: float) -> list[SequenceKey]:
        """Take the leases out that end at ``now`` or earlier, the oldest first. Each is reported once."""
        keys: list[SequenceKey] = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            _, key = heapq.heappop(self._bounds)
            del self._deadlines[key]
            keys.append(key)
        return keys

    @property
    def next_deadline(self) -> float | None:
        """When the next lease ends if nothing renews it; None with no lease held."""
        while self._bounds:
            bound, key = self._bounds[0]
            deadline = self._deadlines.get(key)
            if deadline == bound:
                return bound
            heapq.heappop(self._bounds)
            if deadline is not None:
                heapq.heappush(self._bounds, (deadline, key))
        return None
