"""The way from a phase to the routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serving_core.ids import RouterId
from serving_core.token_event import SequenceEvent


class EventSink(Protocol):
    """Where a phase puts what happened. Called on the engine thread, once a step and router; never blocks and never raises:
    a router that is gone or slow costs that router's sequences only."""

    def emit(self, router_id: RouterId, events: Sequence[SequenceEvent]) -> None:
        """Hand over the events in order."""
