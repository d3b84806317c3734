"""The answers to one request, made side by side and merged into one stream of parts. Knows no JSON and no sending.

1. Entering begins every choice: each waits for its own turn and is handed over on its own.
2. ``next_part`` gives what came next from any of them; the text of one choice stays in order.
3. The first failure ends all of them: a client that asked for n answers gets n, or an error.
4. Leaving ends those still under way and returns when each is released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from router.answer import Answer, Piece
from router.generation import Path

StartAnswer = Callable[[], Awaitable[Answer]]
"""Admits and places one choice; called once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePart:
    """The next token of choice ``index`` and what it adds to its text."""

    index: int
    piece: Piece


class Choices:
    """An async context manager, used by one task. ``starts[i]`` begins choice i."""

    def __init__(self, starts: Sequence[StartAnswer]) -> None:
        self._starts = starts
        self._num_open = len(starts)
        # At most max_tokens parts a choice: a slow client costs memory here and holds no worker up.
        self._parts: asyncio.Queue[ChoicePart | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._first: Answer | None = None

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def path(self) -> Path:
        """The way of the choice that was placed first. Known once there was a part."""
        assert self._first is not None
        return self._first.path

    @property
    def reason(self) -> str:
        """Why it went that way."""
        assert self._first is not None
        return self._first.reason

    async def next_part(self) -> ChoicePart | None:
        """What came next, or None after the last token of the last choice. Raises what any choice raises."""
        if self._num_open == 0:
            return None
        part = await self._parts.get()
        if isinstance(part, Exception):
            raise part
        if part.piece.finish_reason is not None:
            self._num_open -= 1
        return part

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(index, start)) for index, start in enumerate(self._starts)]
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _run(self, index: int, start: StartAnswer) -> None:
        try:
            async with await start() as answer:
                self._first = self._first or answer
                while (piece := await answer.next_piece()) is not None:
                    self._parts.put_nowait(ChoicePart(index=index, piece=piece))
        except Exception as error:
            self._parts.put_nowait(error)
