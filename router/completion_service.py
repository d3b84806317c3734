"""From a checked body to a response: the prompt's tokens, the sampling, the request. Knows no JSON and no sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.answer import Answer, GenerationMetrics
from router.chat_template import ChatTemplate
from router.completion_response import CompletionResponse
from router.generation import Generator
from router.openai_replies import ChatReply, Reply, TextReply
from router.openai_schemas import ChatCompletionBody, CompletionBody, CompletionOptions
from router.sampling_request import sampling_params
from router.tokenizer import Tokenizer
from serving_core.clock import Clock
from serving_core.errors import InvalidRequest
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey

_MAX_CHARS_ON_LOOP = 8192
"""Longer prompts are tokenised in a thread: this many characters take one to five milliseconds."""


class CompletionService:
    """Answers completion requests for one model. ``unix_time`` is in whole seconds, ``draw_seed`` gives 0 to 2**64 - 1."""

    def __init__(
        self,
        *,
        generator: Generator,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        model_name: str,
        metrics: GenerationMetrics,
        clock: Clock,
        unix_time: Callable[[], int],
        make_id: Callable[[], str],
        draw_seed: Callable[[], int],
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._model_name = model_name
        self._metrics = metrics
        self._clock = clock
        self._unix_time = unix_time
        self._make_id = make_id
        self._draw_seed = draw_seed

    def check_model(self, model: str | None) -> None:
        """Raises ``InvalidRequest`` with code ``model_not_found`` for any name but ours; none at all means ours."""
        if model and model != self._model_name:
            raise InvalidRequest(
                f"The model {model[:80]!r} is not served here; {self._model_name!r} is.", param="model", code="model_not_found"
            )

    async def chat(self, body: ChatCompletionBody) -> CompletionResponse:
        """Raises ``InvalidRequest``; everything else shows when the response is sent."""
        arrived_at = self._clock.now()
        self.check_model(body.model)
        text = self._chat_template.render(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        # The template has written the special tokens already.
        token_ids = await self._encode(text, prompt_param="messages", add_special_tokens=False)
        completion_id = f"chatcmpl-{self._make_id()}"
        reply = ChatReply(
            completion_id=completion_id,
            model=self._model_name,
            created=self._unix_time(),
            includes_usage=body.includes_usage,
        )
        return self._respond(body, completion_id, token_ids, reply, prompt_param="messages", arrived_at=arrived_at)

    async def complete(self, body: CompletionBody) -> CompletionResponse:
        """Raises ``InvalidRequest``. An empty prompt works only where the model puts a BOS token in front of every text."""
        arrived_at = self._clock.now()
        self.check_model(body.model)
        token_ids = await self._encode(body.prompt, prompt_param="prompt", add_special_tokens=True)
        completion_id = f"cmpl-{self._make_id()}"
        reply = TextReply(
            completion_id=completion_id,
            model=self._model_name,
            created=self._unix_time(),
            includes_usage=body.includes_usage,
        )
        return self._respond(body, completion_id, token_ids, reply, prompt_param="prompt", arrived_at=arrived_at)

    def _respond(
        self,
        options: CompletionOptions,
        completion_id: str,
        token_ids: tuple[int, ...],
        reply: Reply,
        *,
        prompt_param: str,
        arrived_at: float,
    ) -> CompletionResponse:
        sampling = sampling_params(
            options,
            prompt_param=prompt_param,
            num_prompt_tokens=len(token_ids),
            max_model_len=self._generator.max_model_len,
            vocab_size=self._tokenizer.vocab_size,
            drawn_seed=self._draw_seed(),
        )
        self._generator.check_fits(num_prompt_tokens=len(token_ids), max_tokens=sampling.max_tokens)
        request = GenerateRequest(key=SequenceKey(RequestId(completion_id)), prompt_token_ids=token_ids, sampling=sampling)

        async def start() -> Answer:
            return Answer(
                generation=await self._generator.start(request),
                tokenizer=self._tokenizer,
                stops=options.stop or (),
                num_prompt_tokens=len(token_ids),
                metrics=self._metrics,
                clock=self._clock,
                arrived_at=arrived_at,
            )

        return CompletionResponse(
            start=start, reply=reply, is_stream=bool(options.stream), includes_usage=options.includes_usage
        )

    async def _encode(self, text: str, *, prompt_param: str, add_special_tokens: bool) -> tuple[int, ...]:
        max_model_len = self._generator.max_model_len
        at_least = self._tokenizer.min_num_tokens(text)
        if at_least > max_model_len:  # told without tokenising, which takes a second a megabyte
            raise InvalidRequest(
                f"The context window is {max_model_len} tokens, but the prompt has at least {at_least}; shorten it.",
                param=prompt_param,
                code="context_length_exceeded",
            )
        if len(text) <= _MAX_CHARS_ON_LOOP:
            token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            token_ids = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise InvalidRequest(
                f"{prompt_param} is empty, but must give this model at least one token.",
                param=prompt_param,
                code="invalid_value",
            )
        return token_ids
