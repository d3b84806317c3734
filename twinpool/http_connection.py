"""One client's connection: uvicorn's, with errors in this server's form and an end to requests that never become whole."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.http_errors import HttpError

MAX_HEAD_BYTES = 16 * 2**10
"""Of a request line and headers that are not whole yet: h11 takes a larger head where it comes in one read."""


class HttpConnection(H11Protocol):
    """A request, from its first byte to its last, has ``request_timeout_s`` to arrive; a connection without one is idle, from
    the beginning on, and closes after uvicorn's time for that."""

    def __init__(self, *args: Any, request_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timeout_s = request_timeout_s
        self._request_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._start_idle_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Uvicorn calls it for bytes that came, and after an answer for those that had to wait for it."""
        body_of = self.cycle if self.conn.their_state is h11.SEND_BODY else None
        super().handle_events()
        if body_of is not None and not (self.conn.their_state is h11.SEND_BODY and self.cycle is body_of):
            self._stop_request_timer()  # that body is whole: what is incomplete now is the next request
        if self._is_request_incomplete():
            self._unset_keepalive_if_required()
            if self._request_timer is None:
                self._request_timer = self.loop.call_later(self._request_timeout_s, self._give_up_request)
            return
        self._stop_request_timer()
        if self.conn.their_state is h11.IDLE:
            self._start_idle_timer()

    def shutdown(self) -> None:
        """What uvicorn calls when the server stops: a request that has not come yet is waited for no longer."""
        if self._is_request_incomplete() and self._can_answer():
            message = "The request was not complete when the server stopped."
            self._end_with(HttpError(status=503, message=message, code="no_capacity", headers={"retry-after": "1"}))
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for bytes that are no HTTP; ``msg`` is its text for that."""
        message = (
            "The request is not valid HTTP/1.1: its request line, a header or a chunk of its body is malformed, or its head is "
            f"not complete after {MAX_HEAD_BYTES} bytes."
        )
        self._end_with(HttpError(status=400, message=message, code="invalid_http"))

    def _give_up_request(self) -> None:
        message = f"The request was not complete {self._request_timeout_s:g} s after its first byte."
        self._end_with(HttpError(status=408, message=message, code="request_timeout"))

    def _end_with(self, error: HttpError) -> None:
        """Close the connection, with an answer unless another one has begun."""
        self._stop_request_timer()
        if self._can_answer():
            # a head was read exactly in the latter state
            is_head = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(error.body)).encode()),
                (b"connection", b"close"),
                *((name.encode(), value.encode()) for name, value in error.headers.items()),
            ]
            self._write(h11.Response(status_code=error.status, headers=headers))
            if not is_head:
                self._write(h11.Data(data=error.body))
            self._write(h11.EndOfMessage())
        if self.cycle is not None:
            self.cycle.disconnected = True  # what the application still says is for nobody
            self.cycle.message_event.set()  # and it hears of that now, even where the client reads nothing of what is left
        self.transport.close()

    def _write(self, event: h11.Event) -> None:
        self.transport.write(self.conn.send(event) or b"")

    def _can_answer(self) -> bool:
        """Whether no answer has begun since the last one ended."""
        return self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    def _is_request_incomplete(self) -> bool:
        if self.transport.is_closing():
            return False
        has_part_of_head = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        return has_part_of_head or self.conn.their_state is h11.SEND_BODY

    def _start_idle_timer(self) -> None:
        """Uvicorn's own, which it starts only after an answer."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
