"""The ``Generator`` over two pools: owns the sequences under way, from admission to the last release."""

from __future__ import annotations

from collections.abc import Callable

from router.background_tasks import BackgroundTasks
from router.generation import Generation
from router.request_life import DecisionCounter, RequestLife
from router.retry_budget import RetryPolicy
from router.waiting_line import WaitingLine
from router.worker_directory import WorkerDirectory
from serving_core.errors import InvalidRequest, NoCapacity, WorkerLost
from serving_core.generate_request import GenerateRequest
from serving_core.worker_status import PhaseName, WorkerHello

_STOPPING = "the server is stopping"


class PairGenerator:
    """Starts lives and ends them together. ``max_model_len`` is the model's own window, for as long as no worker has told its
    own. ``tasks`` holds each life and each release until it is done. ``draw_jitter`` gives a number from 0 up to 1."""

    def __init__(
        self,
        *,
        directory: WorkerDirectory,
        line: WaitingLine,
        tasks: BackgroundTasks,
        decisions: DecisionCounter,
        draw_jitter: Callable[[], float],
        retry_policy: RetryPolicy | None = None,
        max_model_len: int | None = None,
        retry_after_s: float = 2.0,
    ) -> None:
        self._directory = directory
        self._line = line
        self._tasks = tasks
        self._decisions = decisions
        self._draw_jitter = draw_jitter
        self._retry_policy = retry_policy or RetryPolicy()
        self._max_model_len = max_model_len
        self._retry_after_s = retry_after_s
        self._is_draining = False
        self._lives: set[RequestLife] = set()
        directory.subscribe(line.poke)

    @property
    def max_model_len(self) -> int:
        """See ``Generator``. Raises ``NoCapacity`` while neither a worker nor the constructor has told it."""
        windows = [hello.max_model_len for hello in self._hellos()]
        if self._max_model_len is not None:
            windows.append(self._max_model_len)
        if not windows:
            raise self._no_capacity("no worker has registered yet")
        return min(windows)

    @property
    def num_live(self) -> int:
        """Sequences that have not ended, those in line included."""
        return len(self._lives)

    def check_fits(self, *, num_prompt_tokens: int, max_tokens: int) -> None:
        hellos = self._hellos()
        prefill = [hello for hello in hellos if PhaseName.PREFILL in hello.phases]
        decode = [hello for hello in hellos if PhaseName.DECODE in hello.phases]
        if prefill and not any(_can_hold(hello, num_prompt_tokens) for hello in prefill):
            raise InvalidRequest(
                f"The prompt has {num_prompt_tokens} tokens but the KV cache of a prefill worker holds at most "
                f"{max(map(_num_cache_tokens, prefill))}.",
                param="prompt",
                code="exceeds_kv_cache",
            )
        if decode and not any(_can_hold(hello, num_prompt_tokens + max_tokens) for hello in decode):
            raise InvalidRequest(
                f"The prompt's {num_prompt_tokens} tokens and an answer of up to {max_tokens} together exceed the "
                f"{max(map(_num_cache_tokens, decode))} tokens that the KV cache of a decode worker holds.",
                param="max_tokens",
                code="exceeds_kv_cache",
            )

    async def start(self, request: GenerateRequest) -> Generation:
        if self._is_draining:
            raise self._no_capacity(_STOPPING)
        self.check_fits(num_prompt_tokens=request.num_prompt_tokens, max_tokens=request.sampling.max_tokens)
        life = RequestLife(
            request,
            workers=self._directory.serving,
            line=self._line,
            tasks=self._tasks,
            decisions=self._decisions,
            retry_policy=self._retry_policy,
            draw_jitter=self._draw_jitter,
            on_end=self._lives.discard,
        )
        self._lives.add(life)
        await life.open()
        return life

    @property
    def is_draining(self) -> bool:
        """Whether new sequences are refused."""
        return self._is_draining

    def begin_drain(self) -> None:
        """Refuse new sequences from now on; those accepted run to their end."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Return when no sequence is left and each release has been answered or given up. The caller bounds the time."""
        await self._tasks.join()

    async def close(self) -> None:
        """End every sequence, with ``WorkerLost`` or, before it was under way, ``NoCapacity``, and wait for the releases.
        Idempotent."""
        self.begin_drain()
        for life in list(self._lives):
            life.fail(WorkerLost(f"The sequence ends here: {_STOPPING}.") if life.is_open else self._no_capacity(_STOPPING))
        await self._tasks.join()

    def _no_capacity(self, because: str) -> NoCapacity:
        return NoCapacity(f"The request cannot be taken: {because}.", retry_after_s=self._retry_after_s)

    def _hellos(self) -> list[WorkerHello]:
        return [worker.hello for worker in self._directory.registered()]


def _num_cache_tokens(hello: WorkerHello) -> int:
    return hello.num_pages * hello.layout.page_size


def _can_hold(hello: WorkerHello, num_tokens: int) -> bool:
    return hello.layout.num_pages_for(num_tokens) <= hello.num_pages
