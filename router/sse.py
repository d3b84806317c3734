"""Server-sent events: the headers of a stream and the frames in it. Knows no requests."""

from __future__ import annotations

import json
from collections.abc import Mapping

STREAM_HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""A proxy must neither store nor gather what is sent; nothing here ever compresses it."""

DONE = b"data: [DONE]\n\n"


def json_frame(value: object) -> bytes:
    """One event. JSON holds no line feed, so one ``data:`` line is enough."""
    return raw_frame(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8"))


def raw_frame(payload: bytes) -> bytes:
    """One event around JSON that is already written."""
    return b"data: " + payload + b"\n\n"
