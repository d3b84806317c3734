"""What Ctrl-C and SIGTERM mean to a server: the first asks it to finish, the second to stop at once."""

from __future__ import annotations

import asyncio
import signal

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Two events, set by the first and by any further signal. A server that finishes for another reason sets ``finish`` itself,
    so that the next signal stops it at once. Lives on the running loop of the main thread."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        self.stop_now = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take)

    def _take(self) -> None:
        if self.finish.is_set():
            self.stop_now.set()
        self.finish.set()
