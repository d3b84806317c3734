"""What a gRPC server does with bytes that are no message. gRPC by itself answers UNKNOWN and logs a traceback."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from serving_core.errors import RefusalCode, Refused

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Decode: TypeAlias = Callable[[bytes], Any]


class RequestDecoding(grpc.aio.ServerInterceptor):
    """Decodes requests in gRPC's stead. A single one that cannot be decoded ends its call with INVALID_ARGUMENT, before its
    method runs; one in a stream is raised where the method reads it, as ``Refused`` (MALFORMED).

    Methods that take raw bytes are left alone.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        decode = _decoder(handler.request_deserializer, handler_call_details.method)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(handler.stream_stream, decode, handler.response_serializer)
        assert handler.unary_unary is not None, "no service has methods of another kind"
        return grpc.unary_unary_rpc_method_handler(
            _decoding(handler.unary_unary, decode), response_serializer=handler.response_serializer
        )


def _decoding(method: Callable[..., Any], decode: _Decode) -> Callable[..., Awaitable[Any]]:
    async def decode_and_call(request: bytes, context: _Context) -> Any:
        try:
            decoded = decode(request)
        except Refused as refused:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
        return await method(decoded, context)

    return decode_and_call


def _decoder(decode: _Decode, method: str) -> _Decode:
    def decode_or_refuse(request: bytes) -> Any:
        try:
            return decode(request)
        except DecodeError:
            text = f"The {len(request)} bytes sent to {method} are not the protobuf message that it takes."
            raise Refused(RefusalCode.MALFORMED, text) from None

    return decode_or_refuse
