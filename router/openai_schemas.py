"""The bodies of /v1/chat/completions, /v1/completions and /generate: types and neutral values, not what is done with them.

Lax where clients are: every optional field may be null, unknown fields are ignored, a whole number may be written 5.0. Strict
where guessing would hide a mistake: a boolean or a string is never a number. A parameter that this version does not serve is
refused unless it holds a neutral value, so that nobody gets an answer made under other rules than asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, TypeGuard, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from router.chat_messages import Message
from router.request_body import RequestBody, shortened
from serving_core.errors import InvalidRequest
from serving_core.sampling_params import MAX_LOGIT_BIASES

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_CACHE_SALT_CHARS = 256
MAX_NUMBER_DIGITS = 40
"""Of a whole number: the messages of those who check its range repeat it in full."""
MAX_CHOICES = 128
"""Answers to one request, over all its prompts. Each is a sequence of its own on the workers."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

_T = TypeVar("_T")

Prompt = str | tuple[int, ...]
"""One prompt: text, or token ids that are used as they are."""


def _whole_number(value: object) -> object:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, int) and abs(number) >= 10**MAX_NUMBER_DIGITS:
        raise ValueError(f"is {shortened(value)} but must be a whole number of at most {MAX_NUMBER_DIGITS} digits")
    return number


def _stop_strings(value: object) -> tuple[str, ...] | None:
    """A string or a list of strings."""
    if value is None:
        return None
    right = f"a string or a list of at most {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_STRING_CHARS} characters"
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise ValueError(f"is {shortened(value)} but must be {right}")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"is a list of {len(stops)} items but must be {right}")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_STRING_CHARS:
            shown = f"a string of {len(stop)} characters" if isinstance(stop, str) and stop else shortened(stop)
            raise ValueError(f"{'is' if isinstance(value, str) else 'holds'} {shown} but must be {right}")
    return tuple(stops)


def _false_is_none(value: object) -> object:
    return None if value is False else value


def _prompts(value: object) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        right = "a string, a list of token ids, or a list of either that is not empty"
        raise ValueError(f"is {shortened(value)} but must be {right}")
    if _is_all(value, str):
        return tuple(value)
    if _is_all(value, int):
        return (tuple(value),)
    if _is_all(value, list) and all(prompt and _is_all(prompt, int) for prompt in value):
        return tuple(map(tuple, value))
    right = "only strings, only token ids, or only lists of token ids, none of them empty"
    raise ValueError(f"is {shortened(value)} but must hold {right}")


def _is_all(items: list[object], kind: type[_T]) -> TypeGuard[list[_T]]:
    return all(type(item) is kind for item in items)  # a boolean is no token id


def _one_prompt(value: object) -> Prompt:
    prompts = _prompts(value)
    if len(prompts) != 1:
        raise ValueError(f"holds {len(prompts)} prompts, but must be one; /v1/completions takes several")
    return prompts[0]


def _token_id(value: object) -> object:
    if not isinstance(value, str) or not _TOKEN_ID.fullmatch(value):
        message = f"logit_bias has the key {str(value)[:20]!r}, but must map token ids to biases."
        raise InvalidRequest(message, param="logit_bias", code="invalid_value")
    return int(value)


WholeNumber = Annotated[int, BeforeValidator(_whole_number), Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
StopStrings = Annotated[tuple[str, ...] | None, PlainValidator(_stop_strings)]
Bias = Annotated[Number, Field(ge=-100, le=100)]
"""Its range is checked here, where a mistake still has its token's id beside it."""
LogitBias = Annotated[dict[Annotated[int, BeforeValidator(_token_id)], Bias], Field(max_length=MAX_LOGIT_BIASES)]

_NOT_SERVED: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "suffix": ("",),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}
"""Parameters that no kind of generation serves yet."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: Flag | None = None


class SamplingOptions(RequestBody):
    """What every kind of generation has in common. Ranges are checked where ``SamplingParams`` is made."""

    neutral_values: ClassVar = _NOT_SERVED

    model: Text | None = None
    stream: Flag | None = None
    max_tokens: WholeNumber | None = None
    max_completion_tokens: WholeNumber | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: WholeNumber | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: LogitBias | None = None
    seed: WholeNumber | None = None
    min_tokens: WholeNumber | None = None
    ignore_eos: Flag | None = None
    stop: StopStrings = None
    stop_token_ids: Annotated[tuple[WholeNumber, ...], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The client's limit and the name it used; the newer name wins where both are given."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def wanted_logprobs(self) -> tuple[str, int | None]:
        """How many alternatives the client wants beside each token, None for no logprobs at all, after its name for that."""
        return "logprobs", None


class CompletionOptions(SamplingOptions):
    """What both of OpenAI's kinds of completion have in common."""

    n: Annotated[WholeNumber, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> CompletionOptions:
        if self.stream_options is not None and not self.stream:
            message = "stream_options is only allowed together with stream = true."
            raise InvalidRequest(message, param="stream_options", code="invalid_value")
        return self

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatCompletionBody(CompletionOptions):
    neutral_values: ClassVar = {**_NOT_SERVED, "echo": (False,), "add_special_tokens": (False,)}

    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    logprobs: Flag | None = None
    top_logprobs: WholeNumber | None = None

    @property
    def wanted_logprobs(self) -> tuple[str, int | None]:
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatCompletionBody:
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs is {self.top_logprobs}, but is only allowed together with logprobs = true."
            raise InvalidRequest(message, param="top_logprobs", code="invalid_value")
        return self

    @model_validator(mode="after")
    def _an_answer_is_continued_or_begun(self) -> ChatCompletionBody:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other: set one of them to false."
            raise InvalidRequest(message, param="continue_final_message", code="invalid_value")
        if self.messages[-1].role != "assistant" or not self.messages[-1].content:
            message = "continue_final_message needs a last message of the role 'assistant' with a text to continue."
            raise InvalidRequest(message, param="continue_final_message", code="invalid_value")
        return self


class CompletionBody(CompletionOptions):
    neutral_values: ClassVar = {
        **_NOT_SERVED,
        "top_logprobs": (0,),
        "continue_final_message": (False,),
        "add_special_tokens": (True,),
    }

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
    echo: Flag | None = None
    logprobs: Annotated[WholeNumber | None, BeforeValidator(_false_is_none)] = None

    @property
    def wanted_logprobs(self) -> tuple[str, int | None]:
        return "logprobs", self.logprobs

    @model_validator(mode="after")
    def _not_too_many_choices(self) -> CompletionBody:
        num_choices = len(self.prompt) * self.num_choices
        if num_choices > MAX_CHOICES:
            raise InvalidRequest(
                f"{len(self.prompt)} prompts with n = {self.num_choices} are {num_choices} answers, but at most {MAX_CHOICES} "
                "are given to one request.",
                param="prompt" if self.num_choices == 1 else "n",
                code="invalid_value",
            )
        return self

    @model_validator(mode="after")
    def _prompts_have_no_logprobs(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            message = "echo together with logprobs is not supported yet: logprobs of a prompt are not computed."
            raise InvalidRequest(message, param="echo", code="unsupported_parameter")
        return self


class GenerateBody(SamplingOptions):
    neutral_values: ClassVar = {
        **_NOT_SERVED,
        "n": (1,),
        "echo": (False,),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "add_special_tokens": (True,),
    }

    prompt: Annotated[Prompt, PlainValidator(_one_prompt)]
