"""The outermost layer around every request: gives it its ``x-request-id`` and turns what nobody caught into a 500.

A client's own id is echoed and never used as a key; characters that are not visible ASCII are dropped from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http_errors import http_error

MAX_REQUEST_ID_CHARS = 128

_log = logging.getLogger(__name__)


class RequestScope:
    """ASGI middleware. ``make_id`` returns a fresh id for a client that sent none."""

    def __init__(self, app: ASGIApp, *, make_id: Callable[[], str]) -> None:
        self._app = app
        self._make_id = make_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _sent_id(scope) or f"req-{self._make_id()}"
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # it left before its request was whole
        except Exception as error:
            if is_started:
                raise  # the server can only cut the connection now, and says so in its log
            _log.exception("Request %s failed.", request_id)
            await http_error(error).response()(scope, receive, send_with_id)


def _sent_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return "".join(chr(byte) for byte in value if 0x21 <= byte <= 0x7E)[:MAX_REQUEST_ID_CHARS]
    return ""
