"""One router, composed: directory, line, generator and link behind the HTTP application.

Life: 1. construct; 2. ``start_link``, and tell workers the address; 3. serve ``app``; 4. ``begin_drain``; 5. ``stop``.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence

from fastapi import FastAPI

from router.admin_api import make_admin_routes
from router.app import create_app
from router.background_tasks import BackgroundTasks
from router.chat_template import ChatTemplate
from router.generation import Generator
from router.health_api import make_health_routes
from router.link_server import LinkServer
from router.metrics import RouterMetrics, WorkerMetrics
from router.pair_generator import PairGenerator
from router.registered_worker import MAX_SILENCE_S
from router.tokenizer import Tokenizer
from router.waiting_line import WaitingLine
from router.warm_up import WarmUp
from router.worker_client import WorkerClient
from router.worker_directory import WorkerDirectory, WorkerState
from serving_core.clock import Clock, MonotonicClock
from serving_core.errors import ConfigError
from serving_core.ids import RouterId, WorkerId
from serving_core.rpc.channel import make_server
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.rpc.lasting_server import LastingServer
from serving_core.rpc.v1.router_link_pb2_grpc import add_RouterLinkServicer_to_server
from serving_core.worker_status import Role, WorkerHello

LEASES_UNTIL_DEAD = 3
"""A worker whose stream has been gone for this many leases is shown as dead."""

LINK_END_TIMEOUT_S = 0.5


class Router:
    """Everything between a client's HTTP request and the two pools. All of it runs on one asyncio loop.

    ``model_print`` is what workers must hold; without one, the first worker to register decides. ``max_model_len`` is the
    window that workers are started with, used until they have told theirs. ``lease_s`` is the workers' lease;
    ``worker_wait_s`` is how long a request waits for a missing worker; ``max_waiting`` bounds the line. A worker that tells no
    status for ``max_silence_s``, which must be well above its longest step, counts as lost. Router and workers talk to one
    another, and to nobody else, by ``cluster_token``. ``warm_prompts`` are token ids that a worker is to have in its prefix
    cache before it takes requests.
    """

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        model_print: str | None = None,
        max_model_len: int | None = None,
        lease_s: float = 6.0,
        worker_wait_s: float = 30.0,
        max_waiting: int = 256,
        max_silence_s: float = MAX_SILENCE_S,
        warm_prompts: Sequence[tuple[int, ...]] = (),
        api_key: str | None = None,
        admin_key: str | None = None,
        cluster_token: ClusterToken = OPEN,
        clock: Clock | None = None,
        router_id: RouterId | None = None,
        draw_jitter: Callable[[], float] = random.random,
    ) -> None:
        clock = clock or MonotonicClock()
        self.router_id = router_id or RouterId(uuid.uuid4().hex)
        self._tasks = BackgroundTasks()
        self._max_silence_s = max_silence_s
        self._token = cluster_token
        self._directory = WorkerDirectory(
            clock=clock,
            dead_after_s=LEASES_UNTIL_DEAD * lease_s,
            connect=self._connect,
            tasks=self._tasks,
            come_cold=bool(warm_prompts),
            max_silence_s=max_silence_s,
        )
        line = WaitingLine(
            clock=clock,
            missing_phases=self._directory.missing_phases,
            worker_wait_s=worker_wait_s,
            max_waiting=max_waiting,
        )
        self._metrics = RouterMetrics(model_name=model_name, workers=self._worker_metrics, num_waiting=lambda: len(line))
        self._warm_up = WarmUp(
            warm_prompts,
            directory=self._directory,
            tasks=self._tasks,
            decisions=self._metrics,
            draw_jitter=draw_jitter,
            clock=clock,
        )
        self._generator = PairGenerator(
            directory=self._directory,
            line=line,
            tasks=self._tasks,
            decisions=self._metrics,
            draw_jitter=draw_jitter,
            max_model_len=max_model_len,
        )
        self._link = LinkServer(
            directory=self._directory,
            router_id=self.router_id,
            model_name=model_name,
            model_print=model_print,
            lease_s=lease_s,
        )
        self._server: LastingServer | None = None
        self.app: FastAPI = create_app(
            generator=self._generator,
            tokenizer=tokenizer,
            chat_template=chat_template,
            model_name=model_name,
            metrics=self._metrics,
            extra_routes=(
                make_health_routes(metrics=self._metrics, what_is_missing=self._what_is_missing),
                make_admin_routes(directory=self._directory, clock=clock),
            ),
            api_key=api_key,
            admin_key=admin_key,
            clock=clock,
        )

    async def start_link(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve the link that workers dial. Returns its HOST:PORT; raises ``ConfigError`` when that cannot be bound."""
        assert self._server is None, "the link is started once"
        self._server = make_server(token=self._token)
        add_RouterLinkServicer_to_server(self._link, self._server)
        try:
            bound_port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            await self._server.discard()
            raise ConfigError(f"The router cannot listen for workers on {host}:{port}: {error}.") from error
        await self._server.start()
        return f"{host}:{bound_port}"

    @property
    def generator(self) -> Generator:
        """What the HTTP handlers ask; who embeds a router without HTTP asks here."""
        return self._generator

    def expect(self, worker_id: WorkerId, role: Role) -> None:
        """A process for this worker is being started: shown as starting until it registers, unless it has by now."""
        self._directory.expect(worker_id, role)

    def mark_dead(self, worker_id: WorkerId) -> None:
        """This worker is known not to serve: shown as dead until it registers."""
        self._directory.mark_dead(worker_id)

    async def wait_ready(self) -> None:
        """Return when every needed phase has a ready worker. The caller bounds the time."""
        await self._directory.wait_until(lambda: not self._directory.missing_phases())

    def begin_drain(self) -> None:
        """Answer new requests with 503 from now on; those under way run to their end."""
        self._generator.begin_drain()
        self._warm_up.close()

    async def wait_idle(self) -> None:
        """Return when no request is under way and every release is answered or given up. The caller bounds the time."""
        await self._generator.wait_idle()

    async def stop(self) -> None:
        """End what is left: requests, releases (bounded by their deadline), links, channels. Idempotent."""
        self._warm_up.close()
        await self._generator.close()
        self._directory.close()  # ends the links, which the server then only has to wait for
        if self._server is not None:
            await self._server.stop(LINK_END_TIMEOUT_S)
        await self._tasks.join()

    def _what_is_missing(self) -> list[str]:
        missing = self._directory.missing_phases()
        return [*missing, "a router that takes new requests: this one is draining"] if self._generator.is_draining else missing

    def _connect(self, hello: WorkerHello) -> WorkerClient:
        return WorkerClient(hello, router_id=self.router_id, token=self._token, start_timeout_s=self._max_silence_s)

    def _worker_metrics(self) -> list[WorkerMetrics]:
        return [
            WorkerMetrics(
                worker_id=entry.worker_id,
                role=entry.role.value,
                is_alive=self._directory.state_of(entry) not in (WorkerState.STARTING, WorkerState.DEAD),
                families=entry.worker.status.metrics if entry.worker and entry.worker.status else (),
            )
            for entry in self._directory.entries()
        ]
