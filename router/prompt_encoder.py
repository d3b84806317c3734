"""Prompts to token ids, and token ids to text, without holding up the event loop. Knows no sampling and no HTTP.

Long texts go to a thread, where the tokenizer lets go of the interpreter's lock. What is hopelessly long is refused by its
number of bytes, without tokenising.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from router.chat_messages import Message
from router.chat_template import ChatTemplate
from router.openai_schemas import Prompt
from router.request_body import shortened
from router.tokenizer import Tokenizer
from serving_core.errors import InvalidRequest

_MAX_CHARS_ON_LOOP = 2048
"""This many characters take about a millisecond."""
_MAX_MESSAGES_ON_LOOP = 16
_MAX_IDS_ON_LOOP = 2048
_SLICE_CHARS = 2**18

_T = TypeVar("_T")


class PromptEncoder:
    """``max_model_len`` is asked anew for each prompt: the smallest window of the workers there are."""

    def __init__(self, *, tokenizer: Tokenizer, chat_template: ChatTemplate, max_model_len: Callable[[], int]) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._max_model_len = max_model_len

    async def encode(self, prompt: Prompt, *, param: str = "prompt", add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of one prompt, which fit the window or not, but are at least one. Raises ``InvalidRequest`` naming ``param``
        for an empty prompt, an id beyond the vocabulary, and a text that cannot fit the window however it is tokenised.

        An empty text works where the model puts a BOS token in front of every text.
        """
        is_long = len(prompt) > (_MAX_CHARS_ON_LOOP if isinstance(prompt, str) else _MAX_IDS_ON_LOOP)
        max_model_len = self._max_model_len()

        def encode() -> tuple[int, ...]:
            if not isinstance(prompt, str):
                return self._checked(prompt, param)
            self._check_not_hopeless(prompt, param, max_model_len)
            return self._tokenised(prompt, param, add_special_tokens)

        token_ids = await _run(encode, in_thread=is_long)
        if not token_ids:
            raise InvalidRequest(
                f"{param} is empty, but must give this model at least one token.", param=param, code="invalid_value"
            )
        return token_ids

    async def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, continues_last: bool = False
    ) -> tuple[int, ...]:
        """The ids of a conversation. ``continues_last``: it ends inside its last message, which the answer goes on with.

        Raises ``InvalidRequest`` like ``encode``, and where the chat template cannot render the messages.
        """
        # The template has written the special tokens already.
        text = await self.render(messages, add_generation_prompt=add_generation_prompt and not continues_last)
        if continues_last:
            text = _cut_after_last(text, messages[-1].content or "")
        return await self.encode(text, param="messages", add_special_tokens=False)

    async def encode_any(self, text: str, *, param: str, add_special_tokens: bool) -> tuple[int, ...]:
        """The ids of a text, be it empty or longer than the window. Raises ``InvalidRequest`` for text that is not Unicode."""
        return await _run(
            lambda: self._tokenised(text, param, add_special_tokens),
            in_thread=len(text) > _MAX_CHARS_ON_LOOP,
        )

    async def decode(self, token_ids: tuple[int, ...], *, param: str) -> str:
        """The text of ids, special tokens written out. Raises ``InvalidRequest`` for an id beyond the vocabulary."""

        def decode() -> str:
            return b"".join(map(self._tokenizer.token_bytes, self._checked(token_ids, param))).decode("utf-8", "replace")

        return await _run(decode, in_thread=len(token_ids) > _MAX_IDS_ON_LOOP)

    async def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation. Raises ``InvalidRequest`` where the chat template cannot render it."""
        num_chars = sum(len(message.content or "") for message in messages)
        return await _run(
            lambda: self._chat_template.render(
                [message.for_template() for message in messages], add_generation_prompt=add_generation_prompt
            ),
            in_thread=num_chars > _MAX_CHARS_ON_LOOP or len(messages) > _MAX_MESSAGES_ON_LOOP,
        )

    def _tokenised(self, text: str, param: str, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param=param, code="invalid_value") from error

    def _checked(self, token_ids: tuple[int, ...], param: str) -> tuple[int, ...]:
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self._tokenizer.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidRequest(
                f"{param} holds the token id {shortened(wrong)}, but must hold ids from 0 to {self._tokenizer.vocab_size - 1}.",
                param=param,
                code="invalid_value",
            )
        return token_ids

    def _check_not_hopeless(self, text: str, param: str, max_model_len: int) -> None:
        at_least = 0
        for start in range(0, len(text), _SLICE_CHARS):
            # One less a slice: a token may reach over its end.
            at_least += max(0, self._tokenizer.min_num_tokens(text[start : start + _SLICE_CHARS]) - 1)
            if at_least > max_model_len:
                raise InvalidRequest(
                    f"The context window is {max_model_len} tokens, but the prompt has at least {at_least}; shorten it.",
                    param=param,
                    code="context_length_exceeded",
                )


def _cut_after_last(text: str, content: str) -> str:
    """A rendered conversation up to the end of its last message's content, which templates may have stripped."""
    for ending in (content, content.rstrip(), content.strip()):
        place = text.rfind(ending)
        if ending and place >= 0:
            return text[: place + len(ending)]
    raise InvalidRequest(
        "The chat template of this model changes the last message, so it cannot be continued.",
        param="continue_final_message",
        code="chat_template",
    )


async def _run(work: Callable[[], _T], *, in_thread: bool) -> _T:
    return await asyncio.to_thread(work) if in_thread else work()
