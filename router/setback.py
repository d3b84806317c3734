"""Why one attempt at a sequence is over, and what that costs. Knows no worker and makes no decision."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from serving_core.errors import RefusalCode, Refused, WorkerLost


class SetbackKind(enum.Enum):
    """What an ended attempt means for the next one."""

    FAILURE = enum.auto()
    """Something broke: another attempt is paid from the sequence's budget."""
    TURNED_AWAY = enum.auto()
    """A worker has no room or takes nothing new: costs nothing but time in line."""
    EVICTED = enum.auto()
    """A worker gave the sequence's pages to older ones: the same, and it asks for more room next time."""
    TOO_LARGE = enum.auto()
    """No attempt can succeed."""


_KIND_OF_REFUSAL = {
    RefusalCode.RESOURCE_EXHAUSTED: SetbackKind.TURNED_AWAY,
    RefusalCode.DRAINING: SetbackKind.TURNED_AWAY,
    RefusalCode.TOO_LARGE: SetbackKind.TOO_LARGE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setback:
    """The end of one attempt. ``message`` is a clause without a full stop at its end."""

    kind: SetbackKind
    message: str

    @classmethod
    def of(cls, error: Refused | WorkerLost) -> Setback:
        """What a call to a worker that raised ``error`` means."""
        kind = _KIND_OF_REFUSAL.get(error.code, SetbackKind.FAILURE) if isinstance(error, Refused) else SetbackKind.FAILURE
        return cls(kind=kind, message=str(error).rstrip("."))


def is_about_worker(error: Refused | WorkerLost) -> bool:
    """Whether the next sequence would fare no better with that worker at this moment."""
    return isinstance(error, WorkerLost) or _KIND_OF_REFUSAL.get(error.code) is SetbackKind.TURNED_AWAY
