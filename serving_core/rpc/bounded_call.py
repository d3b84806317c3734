"""How a servicer's method ends when its worker cannot answer: with a status, in bounded time, never with a traceback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
import grpc.aio

from serving_core.errors import WorkerLost

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


@asynccontextmanager
async def bounded_call(context: grpc.aio.ServicerContext[_Request, _Reply], max_wait_s: float) -> AsyncIterator[None]:
    """Ends the call with DEADLINE_EXCEEDED when its body takes longer, and with UNAVAILABLE when the worker is stopping."""
    try:
        async with asyncio.timeout(max_wait_s):
            yield
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"The worker did not come to it within {max_wait_s:g} s.")
    except WorkerLost as lost:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(lost))
