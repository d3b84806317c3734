"""A ``Generator`` that plays back scripts, and keeps account of what was started and what was released."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from router.generation import Path
from serving_core.errors import InvalidRequest
from serving_core.generate_request import GenerateRequest
from serving_core.token_event import FinishReason, TokenEvent, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class Script:
    """Tokens to play; then ``error`` is raised, or the last token carries ``finish_reason``. It waits for ever after as many
    tokens as ``hangs_after`` says."""

    token_ids: Sequence[int] = ()
    finish_reason: FinishReason = FinishReason.STOP
    error: Exception | None = None
    start_error: Exception | None = None
    hangs_after: int | None = None
    hangs_in_start: bool = False
    is_release_slow: bool = False
    num_cached_tokens: int = 0


class ScriptedGeneration:
    path = Path.PAIR
    reason = "default"

    def __init__(self, script: Script, request: GenerateRequest) -> None:
        self._script = script
        self._request = request
        self.num_released = 0
        self.num_taken = 0

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        script = self._script
        for index, token_id in enumerate(script.token_ids):
            if index == script.hangs_after:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            is_last = index == len(script.token_ids) - 1 and script.error is None
            self.num_taken += 1
            yield TokenEvent(
                key=self._request.key,
                attempt=1,
                index=index,
                token_id=token_id,
                logprobs=self._logprobs(index, token_id),
                finish_reason=script.finish_reason if is_last else None,
                num_cached_tokens=0 if index else script.num_cached_tokens,
            )
        if script.hangs_after == len(script.token_ids):
            await asyncio.Event().wait()
        if script.error is not None:
            raise script.error

    def _logprobs(self, index: int, token_id: int) -> TokenLogprobs | None:
        """As many alternatives as were asked for: tokens from id 100 on, of which many are parts of characters."""
        count = self._request.sampling.num_logprobs
        if count is None:
            return None
        return TokenLogprobs(logprob=-0.5 - index, top=tuple((100 + rank, -1.0 - rank) for rank in range(count)))

    async def aclose(self) -> None:
        if self._script.is_release_slow:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        self.num_released += 1


@dataclass
class ScriptedGenerator:
    """Plays ``script`` for every request, or what ``script_of`` gives for it."""

    script: Script = field(default_factory=Script)
    script_of: Callable[[GenerateRequest], Script] | None = None
    max_model_len: int = 512
    max_total_tokens: int = 512
    requests: list[GenerateRequest] = field(default_factory=list)
    generations: list[ScriptedGeneration] = field(default_factory=list)
    num_starting: int = 0

    def check_fits(self, *, num_prompt_tokens: int, max_tokens: int) -> None:
        if num_prompt_tokens + max_tokens > self.max_total_tokens:
            raise InvalidRequest("It can never fit.", param="max_tokens", code="too_large")

    async def start(self, request: GenerateRequest) -> ScriptedGeneration:
        self.requests.append(request)
        script = self.script_of(request) if self.script_of else self.script
        self.num_starting += 1
        try:
            await asyncio.sleep(0)
            if script.hangs_in_start:
                await asyncio.Event().wait()
            if script.start_error is not None:
                raise script.start_error
        finally:
            self.num_starting -= 1
        generation = ScriptedGeneration(script, request)
        self.generations.append(generation)
        return generation

    def assert_no_leaks(self) -> None:
        assert self.num_starting == 0
        assert [generation.num_released for generation in self.generations] == [1] * len(self.generations)


@dataclass
class RecordedMetrics:
    """What was measured, in order."""

    first_tokens: list[float] = field(default_factory=list)
    inter_tokens: list[float] = field(default_factory=list)
    finished: list[tuple[str, int, int]] = field(default_factory=list)

    def observe_first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def observe_inter_token(self, seconds: float) -> None:
        self.inter_tokens.append(seconds)

    def observe_finished(self, reason: str, e2e_seconds: float, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        self.finished.append((reason, num_prompt_tokens, num_generation_tokens))
