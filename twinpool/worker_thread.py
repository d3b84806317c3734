"""Runs one worker's asyncio loop in a thread of its own, and tells others how its start is going. Knows no Ray, so that
whatever holds a process (an actor, a test) can hold a worker."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving_core.errors import TwinpoolError
from twinpool.process_cores import on_cores
from twinpool.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from llm_engine.load_model import LoadedModel

CRASH_EXIT_STATUS = 70
STOP_TIMEOUT_S = 5.0
LOAD_NICENESS = 10
MAX_REPORTS = 20
"""Each one costs its watcher a message, and a message costs more than a piece of the weights."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How much of the weights is loaded. Both are 0 until the size is known."""

    num_bytes_loaded: int
    num_bytes: int


class WorkerThread:
    """Life: 1. ``start``; 2. ``watch_start`` until ready or failed; 3. ``stop``."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._thread = threading.Thread(target=self._run, name=spec.worker_id, daemon=True)
        self._changed = threading.Condition()
        self._progress = LoadProgress(num_bytes_loaded=0, num_bytes=0)
        self._num_reports = 0
        self._started: Future[None] = Future()
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def start(self) -> None:
        """Begin loading; returns at once."""
        self._thread.start()

    def watch_start(self) -> Iterator[LoadProgress]:
        """Progress whenever it has changed; ends when the worker serves. Raises ``TwinpoolError`` when it cannot start."""
        num_seen = -1
        while not self._started.done():
            with self._changed:
                while self._num_reports == num_seen and not self._started.done():
                    self._changed.wait()
                num_seen, progress = self._num_reports, self._progress
            yield progress
        self._started.result()

    def join(self) -> None:
        """Wait until the worker has ended."""
        self._thread.join()

    def stop(self) -> None:
        """End the worker; returns when its server is down, or after ``STOP_TIMEOUT_S``. Idempotent."""
        if self._stop is not None and self._thread.is_alive():
            loop, requested = self._stop
            loop.call_soon_threadsafe(requested.set)
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        gc.disable()  # while modules and the model come, of which nothing is garbage
        try:
            # a thread of its own, since without privileges a lowered priority cannot be raised again
            with ThreadPoolExecutor(max_workers=1, initializer=_lower_priority) as loader:
                loaded = loader.submit(self._load).result()
            asyncio.run(self._serve(loaded))
        except TwinpoolError as error:
            self._finish_start(error)
        except BaseException as error:
            crash(error)
        finally:
            gc.enable()

    def _load(self) -> LoadedModel:
        engine = self._spec.engine
        with on_cores(engine.cpu_cores):
            import torch  # these are heavy, and must not delay whoever constructs us

            import twinpool.worker  # noqa: F401
            from llm_engine.cuda.device_memory import limit_to_share
            from llm_engine.device import CPU, compute_device
            from llm_engine.load_model import load_model

            torch.set_num_threads(engine.num_threads)
            device = compute_device() if self._spec.gpu_share > 0 else CPU
            if device != CPU:
                limit_to_share(device, self._spec.gpu_share)
            quantizations = {phase: engine.quantization(phase) for phase in self._spec.phases}
            return load_model(
                self._spec.model_path,
                dtype=engine.dtype,
                quantizations=quantizations,
                eager_phases=engine.eager_phases,
                device=device,
                on_progress=self._report,
            )

    async def _serve(self, loaded: LoadedModel) -> None:
        import torch

        from twinpool.worker import Worker

        torch.set_num_threads(self._spec.engine.num_threads)  # for this thread, which writes the KV cache once
        requested = asyncio.Event()
        self._stop = (asyncio.get_running_loop(), requested)
        async with Worker.running(self._spec, loaded, on_crash=crash):
            gc.freeze()  # what is there stays: looking through it again and again would hold up tokens
            gc.enable()
            self._finish_start(None)
            await requested.wait()

    def _report(self, num_bytes_loaded: int, num_bytes: int) -> None:
        num_unreported = num_bytes_loaded - self._progress.num_bytes_loaded
        if 0 < num_unreported < num_bytes / MAX_REPORTS and num_bytes_loaded < num_bytes:
            return
        with self._changed:
            self._progress = LoadProgress(num_bytes_loaded=num_bytes_loaded, num_bytes=num_bytes)
            self._num_reports += 1
            self._changed.notify_all()

    def _finish_start(self, error: TwinpoolError | None) -> None:
        with self._changed:
            if error is None:
                self._started.set_result(None)
            else:
                self._started.set_exception(error)
            self._changed.notify_all()


def _lower_priority() -> None:
    """Of the calling thread. A worker that is started again must not show in the streams of the others."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LOAD_NICENESS)


def crash(error: BaseException) -> None:
    """End the process at once, so that whoever supervises it starts a new one. An engine that failed once has no state that
    can be trusted."""
    text = "".join(traceback.format_exception(error))
    os.write(2, f"the worker crashed and its process ends:\n{text}".encode())
    os._exit(CRASH_EXIT_STATUS)
