"""Real workers on a tiny model, with links cut again and again and pools so small that sequences are evicted: every answer is
token for token what it is undisturbed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from llm_engine.load_model import LoadedModel, load_model
from serving_core.engine_config import EngineConfig
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType
from serving_core.sampling_params import SamplingParams
from serving_core.worker_status import PhaseName
from tests.integration.in_process_server import COLOCATED, DECODE, PREFILL, InProcessServer, in_process_server
from tests.tiny_model import write_tiny_gguf

NUM_REQUESTS = 12
MANY_PAGES, FEW_PAGES = 400, 24  # of 16 tokens; the twelve at their longest need about 85
CUT_INTERVAL_S = 0.15

PAIR = (("prefill-0", PREFILL), ("decode-0", DECODE))
TWO_DECODE = (*PAIR, ("decode-1", DECODE))
ONE_WORKER = (("colocated-0", COLOCATED),)


def engine(loaded: LoadedModel, num_pages: int) -> EngineConfig:
    page_bytes = loaded.config.page_layout(page_size=16, dtype=KVDType.FLOAT32).page_bytes
    return EngineConfig(
        dtype=KVDType.FLOAT32,
        page_size=16,
        max_model_len=160,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=num_pages * page_bytes,
        num_threads=1,
        lease_s=1.0,
    )


def requests(name: str) -> list[GenerateRequest]:
    """Prompts of 5 to 82 tokens, every second one sampled."""
    return [
        GenerateRequest(
            key=SequenceKey(RequestId(f"{name}-{n}")),
            prompt_token_ids=tuple(random.Random(n).choices(range(3, 200), k=5 + 7 * n)),
            sampling=SamplingParams(max_tokens=60, temperature=0.0 if n % 2 else 0.9, seed=n, ignore_eos=True),
        )
        for n in range(NUM_REQUESTS)
    ]


async def cut_links(server: InProcessServer, num_cuts: int) -> None:
    """The router takes workers for dead, one at a time; each dials again by itself."""
    chance = random.Random(num_cuts)
    for _ in range(num_cuts):
        await asyncio.sleep(CUT_INTERVAL_S)  # the faults' own rhythm: nothing waits for it
        server.router.mark_dead(WorkerId(chance.choice(sorted(server.workers))))


@pytest.mark.parametrize("workers", [PAIR, TWO_DECODE, ONE_WORKER], ids=["pair", "two-decode", "colocated"])
@pytest.mark.parametrize(("num_pages", "num_cuts"), [(MANY_PAGES, 8), (FEW_PAGES, 0), (FEW_PAGES, 6)])
async def test_disturbed_equals_undisturbed(
    tmp_path: Path, workers: tuple[tuple[str, frozenset[PhaseName]], ...], num_pages: int, num_cuts: int
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(path, dtype=KVDType.FLOAT32)
    async with in_process_server(path, loaded, ONE_WORKER, engine=engine(loaded, MANY_PAGES)) as server:
        undisturbed = [answer.token_ids for answer in await server.generate_all(requests("undisturbed"))]
    async with (
        in_process_server(path, loaded, workers, engine=engine(loaded, num_pages)) as server,
        asyncio.timeout(90),
    ):
        disturbed, _ = await asyncio.gather(server.generate_all(requests("disturbed")), cut_links(server, num_cuts))
        assert [answer.token_ids for answer in disturbed] == undisturbed
        await server.assert_no_leaks(within_s=2.5)
        assert (await server.num_decisions("retry") > 0) == (num_cuts > 0)
        if num_cuts == 0:  # cuts thin the load out, so that there may be room for all
            assert await server.num_decisions("eviction") > 0
