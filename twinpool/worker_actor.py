"""The Ray actor around one worker. Its constructor starts everything, so that Ray's restart alone brings the worker back, as a
new incarnation. Ray is the starter and restarter; no token and no page passes through it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

from twinpool.node_address import node_address
from twinpool.worker_spec import WorkerSpec
from twinpool.worker_thread import LoadProgress, WorkerThread

MAX_CONCURRENCY = 4
"""``watch_start`` and ``watch_life`` each occupy one thread; ``stop`` must find another."""


class WorkerActor:
    """One worker's process. Made an actor by ``worker_pools``."""

    def __init__(self, spec: WorkerSpec) -> None:
        logging.basicConfig(level=logging.INFO, format=f"{spec.worker_id}: %(message)s")
        # a restart may come up on another node
        self._thread = WorkerThread(dataclasses.replace(spec, host=node_address()))
        self._thread.start()

    def watch_start(self) -> Iterator[LoadProgress]:
        """See ``WorkerThread.watch_start``."""
        yield from self._thread.watch_start()

    def watch_life(self) -> None:
        """Never returns while the process lives: its caller learns the death as Ray's error."""
        self._thread.join()

    def stop(self) -> None:
        """End the worker in order; the process stays for ``ray.kill``."""
        self._thread.stop()
