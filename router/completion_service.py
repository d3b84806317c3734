"""From a checked body to a response: the prompts' tokens, the sampling, one sequence a choice. Knows no JSON and no sending."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.answer import Answer, GenerationMetrics
from router.choices import Choices, StartAnswer
from router.completion_response import CompletionResponse
from router.generate_reply import GenerateReply
from router.generation import Generator
from router.logprob_report import LogprobReport
from router.openai_replies import ChatReply, ReplyFrame, TextReply
from router.openai_schemas import ChatCompletionBody, CompletionBody, CompletionOptions, GenerateBody, Prompt, SamplingOptions
from router.prompt_encoder import PromptEncoder
from router.reply import Reply
from router.sampling_request import clients_words, sampling_params
from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer
from serving_core.clock import Clock
from serving_core.errors import InvalidRequest
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey


class CompletionService:
    """Answers completion requests for one model. ``unix_time`` is in whole seconds, ``draw_seed`` gives 0 to 2**64 - 1."""

    def __init__(
        self,
        *,
        generator: Generator,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        model_name: str,
        metrics: GenerationMetrics,
        clock: Clock,
        unix_time: Callable[[], int],
        make_id: Callable[[], str],
        draw_seed: Callable[[], int],
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._model_name = model_name
        self._metrics = metrics
        self._clock = clock
        self._unix_time = unix_time
        self._make_id = make_id
        self._draw_seed = draw_seed
        self._logprob_report = LogprobReport(tokenizer)

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
        token_ids = await self._prompts.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            continues_last=bool(body.continue_final_message),
        )
        request_id = f"chatcmpl-{self._make_id()}"
        return self._respond(
            body,
            request_id=request_id,
            prompts=[token_ids],
            prompt_param="messages",
            reply=ChatReply(self._frame(request_id, body)),
            arrived_at=arrived_at,
            num_choices=body.num_choices,
            includes_usage=body.includes_usage,
        )

    async def complete(self, body: CompletionBody) -> CompletionResponse:
        """Raises ``InvalidRequest``. An empty prompt works only where the model puts a BOS token in front of every text."""
        arrived_at = self._clock.now()
        self.check_model(body.model)
        prompts = [await self._prompts.encode(prompt) for prompt in body.prompt]
        request_id = f"cmpl-{self._make_id()}"
        echoes = [await self._text_of(prompt) for prompt in body.prompt for _ in range(body.num_choices)] if body.echo else []
        return self._respond(
            body,
            request_id=request_id,
            prompts=prompts,
            prompt_param="prompt",
            reply=TextReply(self._frame(request_id, body), echoes=echoes),
            arrived_at=arrived_at,
            num_choices=body.num_choices,
            includes_usage=body.includes_usage,
        )

    async def generate(self, body: GenerateBody) -> CompletionResponse:
        """The plain form: one prompt, one answer with its token ids. Raises ``InvalidRequest``."""
        arrived_at = self._clock.now()
        self.check_model(body.model)
        token_ids = await self._prompts.encode(body.prompt)
        request_id = f"gen-{self._make_id()}"
        return self._respond(
            body,
            request_id=request_id,
            prompts=[token_ids],
            prompt_param="prompt",
            reply=GenerateReply(request_id=request_id),
            arrived_at=arrived_at,
        )

    def _frame(self, request_id: str, body: CompletionOptions) -> ReplyFrame:
        _, num_logprobs = body.wanted_logprobs
        return ReplyFrame(
            id=request_id,
            model=self._model_name,
            created=self._unix_time(),
            includes_usage=body.includes_usage,
            logprobs=None if num_logprobs is None else self._logprob_report,
        )

    async def _text_of(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else await self._prompts.decode(prompt, param="prompt")

    def _respond(
        self,
        options: SamplingOptions,
        *,
        request_id: str,
        prompts: Sequence[tuple[int, ...]],
        prompt_param: str,
        reply: Reply,
        arrived_at: float,
        num_choices: int = 1,
        includes_usage: bool = False,
    ) -> CompletionResponse:
        """``num_choices`` answers to each prompt, in order. All of them are checked before any is begun."""
        stops = StopStrings(options.stop or ())
        starts: list[StartAnswer] = []
        for number, token_ids in enumerate(prompts):
            sampling = sampling_params(
                options,
                prompt_param=prompt_param,
                num_prompt_tokens=len(token_ids),
                max_model_len=self._generator.max_model_len,
                vocab_size=self._tokenizer.vocab_size,
                drawn_seed=self._draw_seed(),
            )
            with clients_words(options, prompt_param):
                self._generator.check_fits(num_prompt_tokens=len(token_ids), max_tokens=sampling.max_tokens)
            # Prompts sent together are requests of their own: each is answered as if it had been sent alone.
            prompt_id = RequestId(request_id if len(prompts) == 1 else f"{request_id}-{number}")
            for choice_index in range(num_choices):
                key = SequenceKey(prompt_id, choice_index)
                salt = (options.cache_salt or "").encode()
                request = GenerateRequest(key=key, prompt_token_ids=token_ids, sampling=sampling, cache_salt=salt)
                starts.append(self._start(request, options, stops, prompt_param, arrived_at))
        return CompletionResponse(
            choices=Choices(starts),
            reply=reply,
            num_prompt_tokens=sum(map(len, prompts)),
            num_choices=num_choices,
            is_stream=bool(options.stream),
            includes_usage=includes_usage,
        )

    def _start(
        self,
        request: GenerateRequest,
        options: SamplingOptions,
        stops: StopStrings,
        prompt_param: str,
        arrived_at: float,
    ) -> StartAnswer:
        async def start() -> Answer:
            with clients_words(options, prompt_param):
                generation = await self._generator.start(request)
            return Answer(
                generation=generation,
                tokenizer=self._tokenizer,
                stops=stops,
                min_tokens=request.sampling.min_tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                metrics=self._metrics,
                clock=self._clock,
                arrived_at=arrived_at,
            )

        return start
