"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from router.chat_messages import Message
from router.openai_schemas import Flag, Text
from router.request_body import RequestBody
from serving_core.errors import InvalidRequest


class TokenizeBody(RequestBody):
    """Either ``prompt`` or ``messages``."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[tuple[Message, ...], Field(min_length=1)] | None = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag | None = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Exactly one of prompt and messages must be given.", param="prompt", code="invalid_value")
        return self


class DetokenizeBody(RequestBody):
    model: Text | None = None
    tokens: Annotated[tuple[Annotated[int, Field(strict=True)], ...], Field()]
