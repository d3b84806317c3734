"""From the bytes of a request to a checked body, or to an ``InvalidRequest`` that names parameter, value and what is right."""

from __future__ import annotations

import asyncio
import json
import reprlib
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from serving_core.errors import InvalidRequest

MAX_BODY_BYTES = 8 * 2**20
"""JSON is parsed under the interpreter's lock, threads or not: 8 MiB of text take 15 ms, of numbers 0.2 s."""
MAX_BRACKETS = 2**18
"""Lists and objects cost most: 8 MiB of nothing else take seconds. Brackets inside texts count too: that is cheap to tell."""

_MAX_BYTES_ON_LOOP = 32 * 2**10


class RequestBody(BaseModel):
    """What every body has in common: unknown fields are ignored, and ``neutral_values`` names known parameters that are not
    served, each with the values that ask for nothing; null always does."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {}


_Body = TypeVar("_Body", bound=RequestBody)


class _Short(reprlib.Repr):
    """With JSON's names for what Python calls None, True and False."""

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802  # reprlib goes by the name of the type
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"


_short = _Short()
_short.maxstring = _short.maxother = 60
_short.maxlevel = 2

_RIGHT_OF_TYPE = {
    "int_type": "a whole number",
    "float_type": "a number",
    "int_parsing": "a whole number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
"""JSON's words where pydantic would use Python's."""


def shortened(value: object) -> str:
    """A client's value as a message may show it, however large it is."""
    return _short.repr(value)


def what_is_right(mistake: Mapping[str, Any]) -> str:
    """The end of a message about one of pydantic's mistakes: what the value must be."""
    right = _RIGHT_OF_TYPE.get(mistake["type"]) or mistake["msg"].removeprefix("Input should be ")
    right = right.replace("Tuple should have", "a list of").replace("String should have", "a text of")
    right = right.replace("Dictionary should have", "a map of")
    return str(right.partition(" after validation")[0])


async def read_checked(request: Request, schema: type[_Body]) -> _Body:
    """Read and check a request's body; a long one is checked in a thread. Raises ``InvalidRequest``."""
    content = await read_body(request)
    if len(content) <= _MAX_BYTES_ON_LOOP:
        return parse_body(content, schema)
    return await asyncio.to_thread(parse_body, content, schema)


async def read_body(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The request's body. Raises ``InvalidRequest`` with code ``request_too_large`` before more than ``max_bytes`` are held."""
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise InvalidRequest(f"The request's body is larger than {max_bytes} bytes.", code="request_too_large")
        chunks.append(chunk)
    return b"".join(chunks)


def parse_body(content: bytes, schema: type[_Body]) -> _Body:
    """Check ``content`` against ``schema``. Raises ``InvalidRequest``; of several mistakes the first is told."""
    return check_fields(_parse_object(content), schema)


def check_fields(fields: Mapping[str, Any], schema: type[_Body]) -> _Body:
    """The same for what was parsed already."""
    for name, neutral in schema.neutral_values.items():
        value = fields.get(name)
        if value is not None and not any(type(value) is type(right) and value == right for right in neutral):
            raise InvalidRequest(
                f"{name} is {shortened(value)}, but this server does not support it yet; leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        _refuse(error)


def _parse_object(content: bytes) -> dict[str, Any]:
    if content.count(b"[") + content.count(b"{") > MAX_BRACKETS:
        raise InvalidRequest(
            f"The request's body holds more than {MAX_BRACKETS} opening brackets, in its lists, objects and texts together.",
            code="request_too_large",
        )
    try:
        fields = json.loads(content, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The request's body is not valid JSON: {error}.", code="invalid_json") from error
    except ValueError as error:  # the interpreter's own limit
        message = f"The request's body holds a whole number of more than {sys.get_int_max_str_digits()} digits."
        raise InvalidRequest(message, code="invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"The request's body must be a JSON object, not {shortened(fields)}.", code="invalid_json")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"The request's body is not valid JSON: {name} is not a number in JSON.", code="invalid_json")


def _refuse(error: ValidationError) -> NoReturn:
    mistake = error.errors(include_url=False)[0]
    location = mistake["loc"]
    path = _path(location)
    # A wrong item in a list of plain values is a wrong list: clients look for the parameter's own name.
    param = str(location[0]) if location and location[0] != "messages" else path
    if mistake["type"] == "missing":
        message = f"{path} is missing."
    elif mistake["type"] == "value_error":
        message = f"{path} {mistake['ctx']['error']}."
    else:
        message = f"{path} is {shortened(mistake['input'])} but must be {what_is_right(mistake)}."
    raise InvalidRequest(message, param=param, code="invalid_value") from error


def _path(location: tuple[int | str, ...]) -> str:
    """Pydantic's location as a client writes it: messages[0].content."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier():
            path += f".{step}" if path else step
        elif step.isdecimal():  # a token id, as the key of an object
            path += f'["{step}"]'
    return path
