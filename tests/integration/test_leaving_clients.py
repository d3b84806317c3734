"""Clients that leave a whole server at any moment, over each transport: real engine threads and a real model, as tiny as it may
be, on pools so small that sequences are evicted. Whoever stays has the text of an undisturbed run.

``TWINPOOL_SEED`` sets the seed. Many: ``.venv/bin/python -m pytest -m slow -s tests/integration/test_leaving_clients.py``
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from llm_engine.engine_calls import run_between_steps
from llm_engine.load_model import LoadedModel, load_model
from serving_core.engine_config import EngineConfig
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.sampling_params import SamplingParams
from tests.integration.in_process_server import COLOCATED, DECODE, PREFILL, InProcessServer, in_process_server
from tests.page_audit import audit_owners
from tests.tiny_model import write_tiny_gguf
from twinpool.transfer_way import TransferWay
from twinpool.worker import Worker

WAYS = (TransferWay.GRPC, TransferWay.SHARED_MEMORY, TransferWay.TORCH_DISTRIBUTED)
PAGE_SIZES = (8, 16, 32)
NUM_TEXTS = 16
MAX_ANSWER = 40
NUM_AT_ONCE = 12
NUM_FEW, NUM_MANY = 60, 1500
AUDIT_EVERY_S = 0.05
LEASE_S = 2.0
ENGINE = EngineConfig(
    dtype=KVDType.FLOAT32,
    page_size=16,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=24,
    kv_cache_memory_bytes=16 << 20,
    num_threads=1,
    lease_s=LEASE_S,
)


def make_request(text: int, name: str) -> GenerateRequest:
    """Half of the texts begin alike."""
    beginning, num_common = text % 2, 10 + 3 * text
    common = [3 + (beginning * 100 + 7 * index) % 256 for index in range(num_common)]
    own = [3 + (31 * text + index) % 256 for index in range(1 + text % 5)]
    sampling = SamplingParams(max_tokens=5 + (text * 7) % (MAX_ANSWER - 4), temperature=0.0, ignore_eos=True)
    return GenerateRequest(key=SequenceKey(RequestId(name)), prompt_token_ids=(*common, *own), sampling=sampling)


async def be_a_client(server: InProcessServer, number: int, expected: list[tuple[int, ...]], chance: random.Random) -> str:
    """How it went: finished, or left before its first token, after some, or at whatever moment."""
    text = chance.randrange(NUM_TEXTS)
    leaves_after = chance.choice((None, None, chance.randrange(1, 20)))
    leaves_at_s = chance.choice((None, chance.random() * 0.05, chance.random()))
    told: list[int] = []
    ending = "left"
    with suppress(TimeoutError):
        async with asyncio.timeout(leaves_at_s):
            generation = await server.router.generator.start(make_request(text, f"r{number}"))
            try:
                async for event in generation:
                    told.append(event.token_id)
                    if len(told) == leaves_after:
                        break
                else:
                    ending = "finished"
            finally:
                await generation.aclose()
    if ending == "finished":
        assert tuple(told) == expected[text], f"client {number} was told another text"
    assert tuple(told) == expected[text][: len(told)], f"client {number} was told other tokens"
    return ending


async def audit(worker: Worker) -> None:
    """Between two steps."""
    phases = [phase for phase in (worker._decode, worker._prefill) if phase is not None]
    await run_between_steps(worker._loop, lambda: audit_owners(worker._pool, *phases))


async def audit_on(server: InProcessServer) -> None:
    """Until cancelled."""
    while True:
        for worker in server.workers.values():
            await audit(worker)
        await asyncio.sleep(AUDIT_EVERY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, and what it answers to each text."""

    path: Path
    loaded: LoadedModel
    expected: list[tuple[int, ...]]


async def come_and_go(subject: Subject, way: TransferWay, seed: int, num_clients: int) -> None:
    path, loaded, expected = subject.path, subject.loaded, subject.expected
    chance = random.Random(seed)
    layout = loaded.config.page_layout(page_size=max(PAGE_SIZES), dtype=KVDType.FLOAT32)
    engine = replace(ENGINE, kv_cache_memory_bytes=9 * layout.page_bytes)  # two of the longest
    page_sizes = {name: chance.choice(PAGE_SIZES) for name in ("prefill-0", "decode-0")}
    workers = [("prefill-0", PREFILL), ("decode-0", DECODE)]
    endings: Counter[str] = Counter()
    has_room = asyncio.Semaphore(NUM_AT_ONCE)

    async def come(server: InProcessServer, number: int) -> None:
        async with has_room:
            endings[await be_a_client(server, number, expected, random.Random(f"{seed}/{number}"))] += 1

    async with in_process_server(path, loaded, workers, engine=engine, page_sizes=page_sizes, transfer=way) as server:
        auditing = asyncio.create_task(audit_on(server))
        async with asyncio.TaskGroup() as clients:
            for number in range(num_clients):
                clients.create_task(come(server, number))
        if auditing.done():
            auditing.result()
        auditing.cancel()
        await server.assert_no_leaks(within_s=3 * LEASE_S)
        for worker in server.workers.values():
            await audit(worker)
        streams = await server.num_page_streams("prefill-0")
        num_evictions = await server.num_decisions("eviction")
    print(f"seed {seed}, {way.value}, pages of {page_sizes}: {dict(endings)}, {num_evictions} evictions, streams {streams}")
    assert streams[way.value] > 0
    assert min(endings["finished"], endings["left"]) > num_clients // 10


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    loaded = load_model(path, dtype=KVDType.FLOAT32)

    async def ask_all() -> list[tuple[int, ...]]:
        async with in_process_server(path, loaded, [("colocated-0", COLOCATED)], engine=ENGINE) as server:
            answers = await server.generate_all([make_request(text, f"t{text}") for text in range(NUM_TEXTS)])
        return [answer.token_ids for answer in answers]

    return Subject(path=path, loaded=loaded, expected=asyncio.run(ask_all()))


@pytest.mark.parametrize("way", WAYS)
async def test_clients_leave(subject: Subject, way: TransferWay) -> None:
    await come_and_go(subject, way, int(os.environ.get("TWINPOOL_SEED", "1")), NUM_FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
async def test_many_clients_leave(subject: Subject, way: TransferWay) -> None:
    await come_and_go(subject, way, int(os.environ.get("TWINPOOL_SEED") or random.randrange(2**32)), NUM_MANY)
