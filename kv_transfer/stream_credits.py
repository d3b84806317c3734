"""What the sender of one stream knows of its receiver: how much was accepted, and how the stream ended. Bounds every wait for
the receiver; moves no byte itself."""

from __future__ import annotations

import asyncio

from kv_transfer.page_answer import decode_answer
from serving_core.errors import RefusalCode, Refused, WorkerLost


class StreamCredits:
    """``max_unanswered_segments`` are the credits: more are never under way. A wait in which nothing is accepted for
    ``stall_timeout_s`` ends the stream with ``WorkerLost``. ``address`` is for messages.

    Life: 1. ``wait_for_credit`` and ``use`` around each segment, while another task hands answers to ``take_answer``;
    2. ``wait_until_accepted``; 3. ``end``, with the first error, which every wait from then on raises.
    """

    def __init__(self, address: str, *, max_unanswered_segments: int, stall_timeout_s: float) -> None:
        assert max_unanswered_segments >= 1
        assert stall_timeout_s > 0
        self._address = address
        self._max_unanswered_segments = max_unanswered_segments
        self._stall_timeout_s = stall_timeout_s
        self._num_written = 0
        self._num_accepted = 0
        self._error: Refused | WorkerLost | None = None
        self._has_news = asyncio.Event()

    @property
    def num_written(self) -> int:
        """Credits used since the beginning."""
        return self._num_written

    @property
    def num_accepted(self) -> int:
        """Of these, those that the receiver has accepted."""
        return self._num_accepted

    @property
    def is_settled(self) -> bool:
        """Everything written was accepted and nothing has gone wrong."""
        return self._error is None and self._num_accepted == self._num_written

    @property
    def is_broken(self) -> bool:
        """The way failed, as opposed to the receiver's refusing."""
        return isinstance(self._error, WorkerLost)

    def raise_error(self) -> None:
        """Raise what ended the stream, if anything has."""
        if self._error is not None:
            raise self._error

    async def wait_for_credit(self) -> None:
        """Returns once one more segment may be under way. Raises ``Refused`` or ``WorkerLost``."""
        while self._num_written - self._num_accepted >= self._max_unanswered_segments:
            await self._wait_for_answer()
        self.raise_error()

    def use(self) -> None:
        """One segment is about to be sent."""
        self._num_written += 1

    async def wait_until_accepted(self) -> None:
        """Returns once every segment written is accepted. Raises ``Refused`` or ``WorkerLost``."""
        while self._num_accepted < self._num_written:
            await self._wait_for_answer()

    def take_answer(self, answer: bytes) -> None:
        """Note what the receiver says, any bytes. Raises its ``Refused``, or ``Refused`` (MALFORMED) for what cannot be."""
        num_accepted = decode_answer(answer)
        if not self._num_accepted < num_accepted <= self._num_written:
            raise Refused(
                RefusalCode.MALFORMED,
                f"{self._address} claims {num_accepted} accepted segments after {self._num_accepted} of {self._num_written}.",
            )
        self._num_accepted = num_accepted
        self._has_news.set()

    def end(self, error: Refused | WorkerLost) -> None:
        """The stream is over; the first error counts."""
        self._error = self._error or error
        self._has_news.set()

    def end_stalled(self) -> None:
        """The receiver was silent for too long. Raises what ended the stream."""
        self.end(WorkerLost(f"{self._address} accepted no page bytes for {self._stall_timeout_s} s."))
        self.raise_error()

    async def _wait_for_answer(self) -> None:
        self.raise_error()
        self._has_news.clear()
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._has_news.wait()
        except TimeoutError:
            self.end_stalled()
        self.raise_error()
