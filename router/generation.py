"""The seam inside the router: HTTP handlers ask for a generation, the pair produces it. Neither side knows the other."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from typing import Protocol

from serving_core.generate_request import GenerateRequest
from serving_core.token_event import TokenEvent


class Path(enum.Enum):
    """Which way a request goes. The values are those of the ``x-twinpool-path`` header."""

    PAIR = "pair"
    LOCAL = "local"


class Generation(Protocol):
    """One sequence under way: placed, but perhaps without a token yet."""

    path: Path
    reason: str
    """Why this path, in one short word (``x-twinpool-reason``, ``pd_decision_total``)."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Tokens from index 0, in order, each once; ends after the event with a finish reason.

        Raises ``WorkerLost`` when a worker went away with the sequence and ``TwinpoolError`` for any other failure.
        """

    async def aclose(self) -> None:
        """Release both workers, whatever the state: client gone, stop string found, or all done. Idempotent; never raises."""


class Generator(Protocol):
    """What HTTP handlers see of the two pools."""

    @property
    def max_model_len(self) -> int:
        """Prompt and answer together may not exceed this: the smallest window of the registered workers."""

    def check_fits(self, *, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises ``InvalidRequest`` for what no registered worker's pool could ever hold."""

    async def start(self, request: GenerateRequest) -> Generation:
        """Admit, wait for a turn and place. Returns when both legs are on their way.

        Raises ``InvalidRequest`` (can never fit), ``NoCapacity`` (queue full, or no worker in time). Cancelling the call
        withdraws the request.
        """
