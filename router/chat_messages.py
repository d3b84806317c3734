"""The messages of a chat request: their shape, and how each becomes what a chat template expects."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from router.chat_template import ChatMessage
from router.request_body import shortened


def _joined_text_parts(value: object) -> object:
    """Content given as parts becomes one string; the parts follow each other without a separator."""
    if value is None or isinstance(value, str):
        return value
    right = 'a string or a list of text parts like {"type": "text", "text": "…"}'
    if not isinstance(value, list):
        raise ValueError(f"is {shortened(value)} but must be {right}")
    texts: list[str] = []
    for number, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has {shortened(part)} as part {number} but must be {right}")
        texts.append(part["text"])
    return "".join(texts)


def _parsed_arguments(value: object) -> object:
    """A call's arguments as templates want them: an object. What is no JSON object is passed on as the string it is."""
    if value is None:
        return {}
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value or "null")
    except (ValueError, RecursionError):
        return value
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else value


class FunctionCall(BaseModel):
    """A call an assistant made earlier in the conversation."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, Field(strict=True)]
    arguments: Annotated[dict[str, object] | str, BeforeValidator(_parsed_arguments)] = Field(default_factory=dict)


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    function: FunctionCall


class Message(BaseModel):
    """One message. Only an assistant may have said nothing; keys that are not named here are left to the template."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Annotated[str, Field(strict=True)] | None, BeforeValidator(_joined_text_parts)] = None
    tool_calls: tuple[ToolCall, ...] | None = None

    @model_validator(mode="after")
    def _only_an_assistant_is_silent(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"has the role {self.role!r} and no content, but only an assistant message may leave it out")
        return self

    def for_template(self) -> ChatMessage:
        """``developer`` is the newer word for ``system`` and the one that templates do not know."""
        extras = self.model_dump(exclude={"role", "content"}, exclude_none=True)
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role=role, content=self.content or "", extras=extras)
