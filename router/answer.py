"""One generation as text: tokens in, pieces of text out, with the stop strings, the usage and the release of both workers.

1. ``next_piece`` takes one token, detokenises it and holds back what may become a stop string.
2. The end comes with the token that has a finish reason, or with a stop string, whichever is first.
3. The generation is released at the end at once, and in any case when the ``async with`` is left. Nobody else releases it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from router.detokenizer import Detokenizer
from router.generation import Generation
from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer
from serving_core.clock import Clock
from serving_core.errors import WorkerLost
from serving_core.token_event import FinishReason, TokenEvent, TokenLogprobs


class GenerationMetrics(Protocol):
    """What is measured of each generation. All times are seconds."""

    def observe_first_token(self, seconds: float) -> None:
        """From the arrival of the request to its first token."""

    def observe_inter_token(self, seconds: float) -> None:
        """Between two tokens of one answer."""

    def observe_finished(self, reason: str, e2e_seconds: float, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Once for each generation that was started. ``reason``: stop, length, abort (the client left) or error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerToken:
    """One sampled token, end tokens and those of a stop string included. ``text_offset``: the characters, complete ones, that
    the tokens before it make, what a stop string takes away included."""

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One token and the text that can be given out with it: often empty, while characters or stop strings are open.
    ``num_cached_tokens``: of the prompt, told with the first token."""

    text: str
    token: AnswerToken
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0


class Answer:
    """The text of one generation. An async context manager; used by one task.

    Stop strings are not looked for in the first ``min_tokens`` tokens.
    """

    def __init__(
        self,
        *,
        generation: Generation,
        tokenizer: Tokenizer,
        stops: StopStrings,
        min_tokens: int = 0,
        num_prompt_tokens: int,
        metrics: GenerationMetrics,
        clock: Clock,
        arrived_at: float,
    ) -> None:
        self.path = generation.path
        self.reason = generation.reason
        self.finish_reason: FinishReason | None = None
        """Why the answer ended; None until ``next_piece`` has returned None."""
        self._generation = generation
        self._events = aiter(generation)
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops.search()
        self._min_tokens = min_tokens
        self._num_chars = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._metrics = metrics
        self._clock = clock
        self._arrived_at = arrived_at
        self._last_token_at = arrived_at
        self._has_failed = False
        self._is_released = False

    async def next_piece(self) -> Piece | None:
        """The next token and what it adds to the text; None after the last.

        Raises what the generation raises: ``WorkerLost`` and other ``TwinpoolError``.
        """
        if self.finish_reason is not None:
            return None
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            self._has_failed = True
            raise WorkerLost("The generation stopped before its last token.") from None
        except Exception:
            self._has_failed = True
            raise
        self._measure()
        piece = self._read(event)
        self.finish_reason = piece.finish_reason
        if self.finish_reason is not None:
            await self._release()
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._release()
        finally:
            self._measure_end()

    def _read(self, event: TokenEvent) -> Piece:
        self._num_completion_tokens += 1
        token = AnswerToken(token_id=event.token_id, text_offset=self._num_chars, logprobs=event.logprobs)
        text = self._text_of(event)
        self._num_chars += len(text)
        finish_reason = event.finish_reason
        if self._num_completion_tokens <= self._min_tokens:
            shown = text
        else:
            shown = self._stops.push(text)
            if self._stops.is_matched:
                finish_reason = FinishReason.STOP
        if event.finish_reason is not None and not self._stops.is_matched:
            shown += self._stops.finish()
        return Piece(text=shown, token=token, finish_reason=finish_reason, num_cached_tokens=event.num_cached_tokens)

    def _text_of(self, event: TokenEvent) -> str:
        match event.finish_reason:
            case None:
                return self._detokenizer.push(event.token_id)
            case FinishReason.LENGTH:
                return self._detokenizer.push(event.token_id) + self._detokenizer.finish()
            case FinishReason.STOP:  # an end token is no part of the text
                return self._detokenizer.finish()

    async def _release(self) -> None:
        if not self._is_released:
            await self._generation.aclose()
            self._is_released = True  # only now: a cancelled release is asked for again

    def _measure(self) -> None:
        now = self._clock.now()
        if self._num_completion_tokens == 0:
            self._metrics.observe_first_token(now - self._arrived_at)
        else:
            self._metrics.observe_inter_token(now - self._last_token_at)
        self._last_token_at = now

    def _measure_end(self) -> None:
        if self.finish_reason is not None:
            reason = self.finish_reason.value
        else:
            reason = "error" if self._has_failed else "abort"
        self._metrics.observe_finished(
            reason, self._clock.now() - self._arrived_at, self._num_prompt_tokens, self._num_completion_tokens
        )
