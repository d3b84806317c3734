"""Split = unsplit over a KV cache of another type than the weights: what one worker stored, the other reads alike."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from llm_engine.load_model import LoadedModel, load_model
from serving_core.generate_request import GenerateRequest
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.equality_prompts import prompts_of_lengths
from tests.integration.in_process_server import InProcessServer, in_process_server
from tests.integration.test_split_equals_unsplit import (
    EDGE_LENGTHS,
    ONE,
    PAIR,
    assert_equal_answers,
    engine_config,
    make_requests,
)
from tests.tiny_model import write_tiny_gguf
from twinpool.model_source import DEFAULT_MODEL, find_model

DEFAULT_PATH = find_model(DEFAULT_MODEL).path


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model over a cache of ``cache_dtype``."""

    path: Path
    loaded: LoadedModel
    dtype: KVDType
    cache_dtype: KVDType
    kv_cache_memory_bytes: int

    @asynccontextmanager
    async def server(self, workers: tuple[tuple[str, frozenset[PhaseName]], ...]) -> AsyncIterator[InProcessServer]:
        engine = replace(
            engine_config(self.dtype, self.cache_dtype),
            max_model_len=512,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
        )
        async with in_process_server(self.path, self.loaded, workers, engine=engine) as server:
            yield server
            await server.assert_no_leaks()

    async def assert_split_equals_unsplit(self, requests: list[GenerateRequest]) -> None:
        async with self.server(PAIR) as pair:
            assert {worker.hello.layout.dtype for worker in pair.workers.values()} == {self.cache_dtype}
            split = await pair.generate_all(requests)
        async with self.server(ONE) as one:
            unsplit = await one.generate_all(requests)
        assert_equal_answers(requests, split, unsplit)


@pytest.mark.parametrize("cache_dtype", [KVDType.INT8, KVDType.FLOAT16])
@pytest.mark.parametrize("dtype", [KVDType.FLOAT32, KVDType.BFLOAT16])
async def test_tiny_model(tmp_path: Path, dtype: KVDType, cache_dtype: KVDType) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", num_layers=3)
    loaded = load_model(path, dtype=dtype)
    case = Case(path=path, loaded=loaded, dtype=dtype, cache_dtype=cache_dtype, kv_cache_memory_bytes=2**21)
    await case.assert_split_equals_unsplit(make_requests(prompts_of_lengths(path, (*EDGE_LENGTHS, 150, 300)), num_tokens=24))


@pytest.mark.parametrize("cache_dtype", [KVDType.INT8, KVDType.FLOAT16])
async def test_default_model(cache_dtype: KVDType) -> None:
    loaded = load_model(DEFAULT_PATH, dtype=KVDType.BFLOAT16)
    case = Case(path=DEFAULT_PATH, loaded=loaded, dtype=KVDType.BFLOAT16, cache_dtype=cache_dtype, kv_cache_memory_bytes=2**26)
    await case.assert_split_equals_unsplit(make_requests(prompts_of_lengths(DEFAULT_PATH, (1, 17, 48)), num_tokens=8))
