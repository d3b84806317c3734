"""The tokens of one answer as the router has them: in order, each index once. Knows neither workers nor attempts."""

from __future__ import annotations

import enum

from serving_core.token_event import TokenEvent


class Verdict(enum.Enum):
    """What a token event is to the log."""

    NEXT = enum.auto()
    """The token that was missing; it is in the log now."""
    KNOWN = enum.auto()
    """A copy of a token that the log has."""
    WRONG = enum.auto()
    """Leaves a gap, or differs from the token that the log has at its index: a worker broke the protocol."""


class TokenLog:
    """Grows by one token at a time and never changes what it has."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    def take(self, event: TokenEvent) -> Verdict:
        """Put ``event`` into its place."""
        if event.index == len(self._token_ids):
            self._token_ids.append(event.token_id)
            return Verdict.NEXT
        if event.index > len(self._token_ids) or self._token_ids[event.index] != event.token_id:
            return Verdict.WRONG
        return Verdict.KNOWN
