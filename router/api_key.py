"""Lets requests with the right key pass. Denies by default: every path is closed but a short public list."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from router.http_errors import HttpError

PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""For probes and scrapers, which have no key."""


class ApiKeyGate:
    """ASGI middleware: ``Authorization: Bearer KEY``. Without any key set it lets everything through.

    ``admin_key`` is what paths under /admin ask for; where it is not set they ask for ``api_key`` like the rest. OPTIONS
    passes: a browser's preflight carries no key and changes nothing.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, admin_key: str | None) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode("utf-8")
        self._admin_key = self._api_key if admin_key is None else admin_key.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            denial = HttpError(
                status=401,
                message="This path needs the server's key as 'Authorization: Bearer KEY', and it is missing or wrong.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await denial.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"]
        key = self._admin_key if path == "/admin" or path.startswith("/admin/") else self._api_key
        if key is None or path in PUBLIC_PATHS or scope["method"] == "OPTIONS":
            return True
        given = _bearer_key(scope)
        # Bytes in constant time: the comparison of texts fails on anything but ASCII.
        return given is not None and hmac.compare_digest(given, key)


def _bearer_key(scope: Scope) -> bytes | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = bytes(values[0]).strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None
