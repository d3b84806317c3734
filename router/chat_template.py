"""Messages to prompt text through the model's own Jinja template, sandboxed: a template comes with a file from strangers.

Knows neither HTTP nor tokens. The sandbox denies attributes that lead to Python's internals, changes to values, and ranges
over 100,000; powers, one of which can take for ever, are denied here, and the length of the outcome is bounded.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.folder_chat_template import read_folder_chat_template
from router.gguf_metadata import read_gguf_metadata
from router.vocabulary import read_vocabulary
from serving_core.errors import InvalidRequest, ModelFileError
from serving_core.folder_special_tokens import read_folder_special_tokens

JsonValue = None | bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]

MAX_RENDERED_CHARS = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message as a template sees it: ``content`` is plain text. ``extras`` are further keys, such as ``name`` or
    ``tool_calls``, passed through."""

    role: str
    content: str
    extras: Mapping[str, JsonValue] = field(default_factory=dict)


class ChatTemplate:
    """A compiled template, or the knowledge that the model has none.

    ``origin`` names the file for error messages. Raises ``ModelFileError`` with the line where a template cannot be compiled.
    """

    def __init__(
        self,
        source: str | None,
        *,
        origin: str,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self._origin = origin
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template = None if source is None else _compile(source, origin=origin, now=now)

    @property
    def is_available(self) -> bool:
        return self._template is not None

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text. Raises ``InvalidRequest`` where the model has no template, the template refuses the messages or
        does something it must not.
        """
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template, so it cannot answer /v1/chat/completions; use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        try:
            pieces = self._template.generate(
                messages=[{**message.extras, "role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
            rendered: list[str] = []
            num_chars = 0
            for piece in pieces:
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise OverflowError(f"its output is longer than {MAX_RENDERED_CHARS} characters")
                rendered.append(piece)
            return "".join(rendered)
        except Exception as error:  # a template is a program: it can raise anything, and none of it is ours
            raise InvalidRequest(
                f"The chat template of this model cannot render these messages: {error}.",
                param="messages",
                code="chat_template",
            ) from error


def read_chat_template(path: Path) -> ChatTemplate:
    """The template of a ``.gguf`` file or of a Hugging Face folder, or one that is not available. Raises ``ModelFileError``."""
    return _read_folder_template(path) if path.is_dir() else _read_gguf_template(path)


def _read_folder_template(folder: Path) -> ChatTemplate:
    tokens = read_folder_special_tokens(folder)
    return ChatTemplate(
        read_folder_chat_template(folder), origin=str(folder), bos_token=tokens.bos or "", eos_token=tokens.eos or ""
    )


def _read_gguf_template(path: Path) -> ChatTemplate:
    metadata = read_gguf_metadata(path)
    vocabulary = read_vocabulary(metadata)
    return ChatTemplate(
        metadata.get("tokenizer.chat_template", str),
        origin=str(path),
        bos_token=vocabulary.text_of(vocabulary.bos_id),
        eos_token=vocabulary.text_of(vocabulary.eos_id),
    )


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> NoReturn:
        raise SecurityError("it raises to a power")


def _compile(source: str, *, origin: str, now: Callable[[], datetime.datetime]) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        autoescape=False,
        optimized=False,
        finalize=_unchanged,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        reason = (error.message or "").rstrip(".")
        raise ModelFileError(f"The chat template of {origin} is wrong in line {error.lineno}: {reason}.") from error
    except Exception as error:  # Python's own compiler has limits, on nested loops and on depth
        raise ModelFileError(f"The chat template of {origin} cannot be compiled: {error}.") from error


@jinja2.pass_context
def _unchanged(_context: jinja2.runtime.Context, value: object) -> object:
    """Asks for the context, so that no constant, however large, is computed while compiling."""
    return value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: JsonValue, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML, which a model was never trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)
