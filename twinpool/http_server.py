"""The HTTP server's socket and its life. Knows nothing of what is served, and leaves signals to whoever owns the process."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from serving_core.errors import ConfigError
from twinpool.http_connection import MAX_HEAD_BYTES, HttpConnection

_BACKLOG = 2048
KEEP_ALIVE_S = 120
"""Longer than clients and proxies keep an idle connection (60 to 90 s), so that they are the ones to close it."""
REQUEST_TIMEOUT_S = 60.0
"""From a request's first byte to its last: the largest body needs 1.1 Mbit/s."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at ``host`` and ``port`` (0: any free one).

    Can be had again at once after a server has left it, but not while another one listens there. Raises ``ConfigError``.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host!r} is no address of this machine: {error.strerror}") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_describe(error, host, port)) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find the socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """Serves one ASGI application on one listening socket, until stopped. A connection may be idle for ``keep_alive_s``, and a
    request may take ``request_timeout_s`` to arrive."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        *,
        keep_alive_s: int = KEEP_ALIVE_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=partial(HttpConnection, request_timeout_s=request_timeout_s),  # type: ignore[arg-type]  # it calls it, no more
            ws="none",
            log_config=None,
            log_level="error",  # its warnings are about what strangers send, as often as they like
            access_log=False,
            lifespan="off",
            timeout_keep_alive=keep_alive_s,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._server = _Server(config)
        self._listener = listener

    async def run(self) -> None:
        """Serve until ``finish`` or ``cut`` was called and has had its effect."""
        await self._server.serve(sockets=[self._listener])

    def finish(self) -> None:
        """Take no new connection and end when every response under way is complete."""
        self._server.should_exit = True

    def cut(self) -> None:
        """End now, whatever is under way."""
        self._server.should_exit = True
        self._server.force_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: the process drains before its HTTP server ends."""
        yield


def _describe(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port} is taken on {host}: choose another one, or 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"--port {port} may not be opened by this user: choose one above 1023"
    return f"cannot listen on {host} port {port}: {error.strerror}"
