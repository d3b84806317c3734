"""The bodies of /v1/chat/completions and /v1/completions. Knows types and neutral values, not what is done with them.

Lax where clients are: every optional field may be null, unknown fields are ignored, a whole number may be written 5.0. Strict
where guessing would hide a mistake: a boolean or a string is never a number. A parameter that this version does not serve is
refused unless it holds a neutral value, so that nobody gets an answer made under other rules than asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from router.chat_messages import Message

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128


def _whole_number(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _list_of_stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _one_prompt(value: object) -> object:
    if not isinstance(value, list):
        return value
    if len(value) == 1 and isinstance(value[0], str):
        return value[0]
    if not value:
        raise ValueError("must be one string")
    raise ValueError("must be one string: token ids and several prompts in one request are not supported yet")


WholeNumber = Annotated[int, BeforeValidator(_whole_number), Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
StopList = Annotated[tuple[Annotated[str, Field(strict=True, min_length=1)], ...], Field(max_length=MAX_STOP_STRINGS)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class StreamOptions(_Body):
    include_usage: Flag | None = None


class CompletionOptions(_Body):
    """What both kinds of completion have in common. Ranges are checked where ``SamplingParams`` is made."""

    model: Text | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    max_tokens: WholeNumber | None = None
    max_completion_tokens: WholeNumber | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: WholeNumber | None = None
    seed: WholeNumber | None = None
    min_tokens: WholeNumber | None = None
    ignore_eos: Flag | None = None
    stop: Annotated[StopList | None, BeforeValidator(_list_of_stops)] = None
    stop_token_ids: Annotated[tuple[WholeNumber, ...], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The client's limit and the name it used; the newer name wins where both are given."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class ChatCompletionBody(CompletionOptions):
    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    add_generation_prompt: Flag | None = None


class CompletionBody(CompletionOptions):
    prompt: Annotated[str, BeforeValidator(_one_prompt), Field(strict=True)]


NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "modalities": (["text"],),
    "audio": (),
    "echo": (False,),
    "suffix": ("",),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}
"""Known parameters that are not served yet, each with the values that ask for nothing; null always does."""
