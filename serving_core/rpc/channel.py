"""How every gRPC channel and server of Twinpool is set up: deadlines are the callers', liveness is here.

A peer that stops answering pings, killed or merely stopped, ends its streams within ``KEEPALIVE_TIME_MS`` plus
``PING_TIMEOUT_MS``. Payloads are unbounded by gRPC; each service bounds its own.
"""

from __future__ import annotations

import grpc.aio

from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.rpc.lasting_server import LastingServer
from serving_core.rpc.request_decoding import RequestDecoding
from serving_core.rpc.token_check import TokenCheck

KEEPALIVE_TIME_MS = 1000
PING_TIMEOUT_MS = 1000

_LIVENESS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_LIVENESS: tuple[tuple[str, int], ...] = (
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)
_NO_SHARED_PORT = (("grpc.so_reuseport", 0),)


def open_channel(address: str, *, max_message_bytes: int = 64 << 20) -> grpc.aio.Channel:
    """A plaintext channel of its own (no subchannel shared with others) to HOST:PORT."""
    options = (
        *_LIVENESS,
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
    )
    # Without a scheme of ours in front, gRPC would read one out of an address, which may come from a peer.
    return grpc.aio.insecure_channel(f"dns:///{address}", options=options)


def make_server(*, token: ClusterToken = OPEN, max_message_bytes: int = 64 << 20) -> LastingServer:
    """A server without services or port yet, for those who know ``token``. Messages above ``max_message_bytes`` are refused by
    gRPC before they are read, bytes that are no message by ``RequestDecoding``."""
    options = (
        *_LIVENESS,
        *_SERVER_LIVENESS,
        *_NO_SHARED_PORT,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    )
    interceptors = (TokenCheck(token), RequestDecoding())
    return LastingServer(lambda: grpc.aio.server(interceptors=interceptors, options=options))
