"""Shows on the terminal how the workers' starts are going: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from serving_core.ids import WorkerId
from twinpool.worker_thread import LoadProgress


class BarDisplay:
    """One bar a worker while its weights load."""

    def __init__(self) -> None:
        self._bars: dict[WorkerId, Any] = {}

    def show_progress(self, worker_id: WorkerId, progress: LoadProgress) -> None:
        if not progress.num_bytes:
            return
        bar = self._bars.get(worker_id)
        if bar is None:
            from tqdm import tqdm

            bar = tqdm(total=progress.num_bytes, desc=worker_id, unit="B", unit_scale=True, unit_divisor=1024, leave=False)
            self._bars[worker_id] = bar
        bar.update(progress.num_bytes_loaded - bar.n)

    def show_ready(self, worker_id: WorkerId, seconds: float) -> None:
        bar = self._bars.pop(worker_id, None)
        if bar is not None:
            bar.close()
        print(f"{worker_id}: ready after {seconds:.1f} s", file=sys.stderr, flush=True)


class LineDisplay:
    """One line when a worker's weights begin to load, one when it serves."""

    def __init__(self) -> None:
        self._loading: set[WorkerId] = set()

    def show_progress(self, worker_id: WorkerId, progress: LoadProgress) -> None:
        if progress.num_bytes and worker_id not in self._loading:
            self._loading.add(worker_id)
            print(
                f"{worker_id}: reading {progress.num_bytes / 2**20:.0f} MiB of weights from disk", file=sys.stderr, flush=True
            )

    def show_ready(self, worker_id: WorkerId, seconds: float) -> None:
        self._loading.discard(worker_id)
        print(f"{worker_id}: ready after {seconds:.1f} s", file=sys.stderr, flush=True)
