"""Split = unsplit: a prefill worker and a decode worker give the tokens of one worker with both phases, for real weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from llm_engine.load_model import LoadedModel, load_model
from serving_core.engine_config import EngineConfig
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.sampling_params import SamplingParams
from serving_core.worker_status import PhaseName
from tests.equality_prompts import mt_bench_turns, prompts_of_lengths
from tests.integration.in_process_server import COLOCATED, DECODE, PREFILL, Answer, in_process_server
from twinpool.model_source import DEFAULT_MODEL, find_model

PATH = find_model(DEFAULT_MODEL).path
EDGE_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 49)
MAX_LOGPROB_DIFFERENCE = 1e-4

PAIR = (("prefill-0", PREFILL), ("decode-0", DECODE))
ONE = (("colocated-0", COLOCATED),)


@pytest.fixture(scope="module", params=[KVDType.FLOAT32, KVDType.BFLOAT16], ids=lambda dtype: dtype.value)
def loaded(request: pytest.FixtureRequest) -> tuple[KVDType, LoadedModel]:
    return request.param, load_model(PATH, dtype=request.param)


def engine_config(dtype: KVDType, cache_dtype: KVDType | None = None) -> EngineConfig:
    return EngineConfig(
        dtype=dtype,
        kv_cache_dtype=cache_dtype,
        page_size=16,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=64,  # several chunks a prompt, several prompts a chunk
        kv_cache_memory_bytes=2**29,
        num_threads=1,
    )


async def answers(
    loaded: tuple[KVDType, LoadedModel], workers: Sequence[tuple[str, frozenset[PhaseName]]], requests: list[GenerateRequest]
) -> list[Answer]:
    dtype, model = loaded
    async with in_process_server(PATH, model, workers, engine=engine_config(dtype)) as server:
        found = await server.generate_all(requests)
        await server.assert_no_leaks()
    return found


def make_requests(prompts: Sequence[Sequence[int]], *, num_tokens: int) -> list[GenerateRequest]:
    """Each prompt greedily, and each with a seed of its own under every truncation. Each with a salt of its own: an answer that
    goes on as another's prompt does would leave that prompt cached in decode's arithmetic, in bfloat16 not the same bits."""
    requests = []
    for number, prompt in enumerate(prompts):
        greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, num_logprobs=2)
        seeded = SamplingParams(
            max_tokens=num_tokens, temperature=0.9, top_p=0.95, top_k=50, seed=1000 + number, num_logprobs=0
        )
        for name, sampling in (("greedy", greedy), ("seeded", seeded)):
            key = SequenceKey(RequestId(f"{number}-{name}"))
            salt = key.request_id.encode()
            requests.append(GenerateRequest(key=key, prompt_token_ids=tuple(prompt), sampling=sampling, cache_salt=salt))
    return requests


async def assert_split_equals_unsplit(loaded: tuple[KVDType, LoadedModel], requests: list[GenerateRequest]) -> None:
    split, unsplit = await asyncio.gather(answers(loaded, PAIR, requests), answers(loaded, ONE, requests))
    assert_equal_answers(requests, split, unsplit)


def assert_equal_answers(requests: list[GenerateRequest], split: list[Answer], unsplit: list[Answer]) -> None:
    for request, ours, theirs in zip(requests, split, unsplit, strict=True):
        _assert_equal(request, ours, theirs)


def _assert_equal(request: GenerateRequest, split: Answer, unsplit: Answer) -> None:
    what = f"{request.key} with {request.num_prompt_tokens} prompt tokens"
    assert split.token_ids == unsplit.token_ids, what
    assert split.finish_reason == unsplit.finish_reason, what
    for ours, theirs in zip(split.logprobs, unsplit.logprobs, strict=True):
        assert ours is not None, what
        assert theirs is not None, what
        assert ours.logprob == pytest.approx(theirs.logprob, abs=MAX_LOGPROB_DIFFERENCE), what
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top], what


async def test_lengths_around_page_edges(loaded: tuple[KVDType, LoadedModel]) -> None:
    await assert_split_equals_unsplit(loaded, make_requests(prompts_of_lengths(PATH, EDGE_LENGTHS), num_tokens=16))


async def test_mt_bench_turns(loaded: tuple[KVDType, LoadedModel]) -> None:
    await assert_split_equals_unsplit(loaded, make_requests(mt_bench_turns(PATH, 8), num_tokens=16))


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_every_length_to_49(loaded: tuple[KVDType, LoadedModel]) -> None:
    await assert_split_equals_unsplit(loaded, make_requests(prompts_of_lengths(PATH, range(1, 50)), num_tokens=64))


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_all_mt_bench_questions(loaded: tuple[KVDType, LoadedModel]) -> None:
    await assert_split_equals_unsplit(loaded, make_requests(mt_bench_turns(PATH, 80), num_tokens=64))
