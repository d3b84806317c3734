"""A whole server in one process: a real router and real workers on loopback gRPC, without Ray and without HTTP."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from llm_engine.engine_calls import run_between_steps
from llm_engine.load_model import LoadedModel
from router.chat_template import read_chat_template
from router.router import Router
from router.tokenizer import read_tokenizer
from serving_core.engine_config import EngineConfig
from serving_core.generate_request import GenerateRequest
from serving_core.ids import PageId, WorkerId
from serving_core.metric_names import KV_TRANSFER_STREAMS_TOTAL
from serving_core.page_state import PageState
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.token_event import FinishReason, TokenLogprobs
from serving_core.worker_status import PhaseName
from twinpool.transfer_way import TransferWay
from twinpool.worker import Worker
from twinpool.worker_spec import WorkerSpec

PREFILL, DECODE = frozenset({PhaseName.PREFILL}), frozenset({PhaseName.DECODE})
COLOCATED = PREFILL | DECODE
LEASE_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything a client could learn of one sequence. Equal whatever was cached: what its usage says of that,
    ``num_cached_tokens``, is not compared."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessServer:
    """The router and its workers by name, ``prefill-0``, ``decode-0`` or ``colocated-0``. ``link_address`` is where they have
    dialled the router."""

    router: Router
    link_address: str
    workers: dict[str, Worker]

    async def generate(self, request: GenerateRequest) -> Answer:
        """One sequence from start to end. Raises what its generation raises."""
        generation = await self.router.generator.start(request)
        try:
            events = [event async for event in generation]
        finally:
            await generation.aclose()
        assert [event.index for event in events] == list(range(len(events)))
        assert all(event.num_cached_tokens == 0 for event in events[1:])
        return Answer(
            token_ids=tuple(event.token_id for event in events),
            logprobs=tuple(event.logprobs for event in events),
            finish_reason=events[-1].finish_reason,
            num_cached_tokens=events[0].num_cached_tokens,
        )

    async def generate_all(self, requests: Sequence[GenerateRequest]) -> list[Answer]:
        """All of them at once, so that they share batches."""
        return list(await asyncio.gather(*map(self.generate, requests)))

    async def num_decisions(self, reason: str) -> int:
        """How often a sequence was placed for ``reason``, as /metrics tells."""
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.router.app), base_url="http://router") as client:
            text = (await client.get("/metrics")).text
        counts = re.findall(rf'^twinpool:pd_decision_total\{{.*reason="{reason}".*\}} (\S+)$', text, re.MULTILINE)
        return int(sum(map(float, counts)))

    async def counters(self, worker: str) -> dict[str, int]:
        """What that worker counts without labels, by name."""
        status = await self.workers[worker].read_status()
        samples = [family.samples[0] for family in status.metrics if family.kind == "counter"]
        return {sample.name: int(sample.value) for sample in samples if not sample.labels}

    async def num_page_streams(self, worker: str) -> dict[str, int]:
        """How many page streams that worker has opened, by transport."""
        status = await self.workers[worker].read_status()
        family = next(family for family in status.metrics if family.name == KV_TRANSFER_STREAMS_TOTAL)
        return {dict(sample.labels)["transport"]: int(sample.value) for sample in family.samples}

    async def forget_prompts(self, worker: str) -> None:
        """Empty that worker's prefix cache, as if its process had just started."""
        pool = self.workers[worker]._pool
        every_page = [PageId(number) for number in range(pool.num_pages)]
        await run_between_steps(self.workers[worker]._loop, lambda: pool.forget(every_page))

    async def assert_no_leaks(self, *, within_s: float = 1.0) -> None:
        """Every worker's pages are free or cached again, at once or in this time."""
        async with asyncio.timeout(within_s):
            for worker in self.workers.values():
                pages = await worker.read_pages(False)
                while any(page.state is not PageState.CACHED for page in pages.pages):
                    await asyncio.sleep(0.01)
                    pages = await worker.read_pages(False)
                assert pages.is_sum_ok


@asynccontextmanager
async def in_process_server(
    path: Path,
    loaded: LoadedModel,
    workers: Sequence[tuple[str, frozenset[PhaseName]]],
    *,
    engine: EngineConfig,
    page_sizes: Mapping[str, int] | None = None,
    transfer: TransferWay = TransferWay.AUTO,
    transfers: Mapping[str, TransferWay] | None = None,
    token: ClusterToken = OPEN,
    warm_prompts: Sequence[tuple[int, ...]] = (),
) -> AsyncIterator[InProcessServer]:
    """A server with these workers, ready. ``loaded`` is shared: weights are only read. ``page_sizes`` and ``transfers`` are
    those of the workers that have another than ``engine`` and ``transfer`` say. ``warm_prompts``: see ``Router``."""
    crashes: list[BaseException] = []
    router = Router(
        model_name="model",
        tokenizer=read_tokenizer(path),
        chat_template=read_chat_template(path),
        lease_s=engine.lease_s,
        cluster_token=token,
        warm_prompts=warm_prompts,
    )
    async with AsyncExitStack() as stack:
        address = await router.start_link()
        stack.push_async_callback(router.stop)
        running = {}
        for name, phases in workers:
            spec = WorkerSpec(
                worker_id=WorkerId(name),
                phases=phases,
                model_path=path,
                model_name="model",
                engine=replace(engine, page_size=(page_sizes or {}).get(name, engine.page_size)),
                router_addresses=(address,),
                transfer=(transfers or {}).get(name, transfer),
                cluster_token=token,
            )
            running[name] = await stack.enter_async_context(Worker.running(spec, loaded, on_crash=crashes.append))
        async with asyncio.timeout(30):
            await router.wait_ready()
        yield InProcessServer(router=router, link_address=address, workers=running)
    running.clear()
    gc.collect()  # a worker is part of cycles, and holds its KV cache until they are found
    assert not crashes, crashes
