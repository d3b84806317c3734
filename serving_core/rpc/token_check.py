"""Ends gRPC calls of strangers before anything of them is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from serving_core.rpc.cluster_token import ClusterToken

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class TokenCheck(grpc.aio.ServerInterceptor):
    """UNAUTHENTICATED for every call without ``token``, whether or not there is such a method. No message is read, decoded or
    kept for it; nothing is logged either, since a stranger calls as often as he likes. Must be the first interceptor."""

    def __init__(self, token: ClusterToken) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        if self._token.admits(handler_call_details.invocation_metadata or ()):
            return await continuation(handler_call_details)
        return _REFUSING


async def _refuse(_messages: object, context: _Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "The call does not carry this cluster's token.")


# of the kind that leaves reading to its method: for a single request gRPC would read the message first, whatever its size
_REFUSING: _Handler = grpc.stream_stream_rpc_method_handler(_refuse)
