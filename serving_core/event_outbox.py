"""Gathers one step's events, so that each router gets them as one message."""

from __future__ import annotations

from serving_core.event_sink import EventSink
from serving_core.ids import RouterId
from serving_core.token_event import SequenceEvent


class EventOutbox:
    """Events on their way to an ``EventSink``: in order per router, one ``emit`` a router and flush. Engine thread only."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._events: dict[RouterId, list[SequenceEvent]] = {}

    def put(self, router_id: RouterId, event: SequenceEvent) -> None:
        self._events.setdefault(router_id, []).append(event)

    def flush(self) -> None:
        events, self._events = self._events, {}
        for router_id, of_router in events.items():
            self._sink.emit(router_id, of_router)
