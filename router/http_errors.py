"""Every failure as ``{"error": {"message", "type", "param", "code"}}``, worded for the client and without a traceback."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from router.request_body import shortened, what_is_right
from serving_core.errors import InvalidRequest, NoCapacity, TwinpoolError, WorkerLost

_STATUS_OF_CODE = {"model_not_found": 404, "request_too_large": 413}
_TYPE_OF_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}
_MESSAGE_OF_STATUS = {
    404: "There is no such path here; completions are at /v1/chat/completions and /v1/completions.",
    405: "This path does not allow that method.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """One failure as a client sees it. ``headers`` go with the response where nothing has been sent yet."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The JSON, in ASCII, so that no text of a client's can break it."""
        kind = _TYPE_OF_STATUS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode("ascii")

    def response(self) -> Response:
        return Response(self.body, status_code=self.status, media_type="application/json", headers=dict(self.headers))


def http_error(error: Exception) -> HttpError:
    """The answer to ``error``. What is not known here becomes a 500 that tells nothing of the inside; the caller logs it.

    A lost worker is 502: the request may be sent again, by the client, since only it knows what it did with the beginning.
    """
    if isinstance(error, TwinpoolError):
        return _own_error(error)
    if isinstance(error, RequestValidationError):
        return _invalid_parameter(error)
    if isinstance(error, HTTPException):
        message = _MESSAGE_OF_STATUS.get(error.status_code, error.detail)
        return HttpError(status=error.status_code, message=message, headers=error.headers or {})
    return HttpError(status=500, message="The server failed to handle this request.", code="internal_error")


def _own_error(error: TwinpoolError) -> HttpError:
    message = str(error)
    match error:
        case InvalidRequest():
            status = _STATUS_OF_CODE.get(error.code or "", 400)
            return HttpError(status=status, message=message, param=error.param, code=error.code)
        case NoCapacity():
            headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
            if error.is_queue_full:
                return HttpError(status=429, message=message, code="queue_full", headers=headers)
            return HttpError(status=503, message=message, code="no_capacity", headers=headers)
        case WorkerLost():
            return HttpError(status=502, message=message, code="worker_lost")
        case _:
            return HttpError(status=500, message=message, code="internal_error")


def _invalid_parameter(error: RequestValidationError) -> HttpError:
    mistake = error.errors()[0]
    param = str(mistake["loc"][-1])
    message = f"{param} is {shortened(mistake['input'])} but must be {what_is_right(mistake)}."
    return HttpError(status=400, message=message, param=param, code="invalid_value")
