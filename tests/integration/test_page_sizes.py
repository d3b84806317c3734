"""Split = unsplit when the phases' pages differ in size: the pair's tokens are those of one worker with pages of any size."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llm_engine.load_model import LoadedModel, load_model
from serving_core.engine_config import EngineConfig
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.sampling_params import SamplingParams
from tests.integration.in_process_server import COLOCATED, DECODE, PREFILL, Answer, in_process_server
from tests.tiny_model import write_tiny_gguf

PAGE_SIZES = (8, 16, 32)
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65)
NUM_TOKENS = 20  # over a page's edge, from every length
ENGINE = EngineConfig(
    dtype=KVDType.FLOAT32,
    page_size=16,
    max_model_len=128,
    max_num_seqs=64,
    max_num_batched_tokens=24,  # several chunks a prompt, several prompts a chunk
    kv_cache_memory_bytes=16 << 20,
    num_threads=1,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", num_heads=6, num_kv_heads=3)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, dtype=KVDType.FLOAT32)


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    """Each length greedily and with a seed, and no prompt the beginning of another."""
    made = []
    for length in LENGTHS:
        prompt = tuple(3 + (7 * length + 11 * index) % 256 for index in range(length))
        for name, temperature in (("greedy", 0.0), ("seeded", 0.9)):
            sampling = SamplingParams(
                max_tokens=NUM_TOKENS, temperature=temperature, seed=length, num_logprobs=2, ignore_eos=True
            )
            key = SequenceKey(RequestId(f"{length}-{name}"))
            made.append(GenerateRequest(key=key, prompt_token_ids=prompt, sampling=sampling))
    return made


@pytest.fixture(scope="module")
def unsplit(path: Path, loaded: LoadedModel, requests: list[GenerateRequest]) -> list[Answer]:
    return asyncio.run(answers_of(path, loaded, requests, {"colocated-0": 16}))


async def answers_of(
    path: Path,
    loaded: LoadedModel,
    requests: Sequence[GenerateRequest],
    page_sizes: dict[str, int],
    *,
    dtype: KVDType = KVDType.FLOAT32,
    cache_dtype: KVDType | None = None,
) -> list[Answer]:
    phases = {"prefill-0": PREFILL, "decode-0": DECODE, "colocated-0": COLOCATED}
    workers = [(name, phases[name]) for name in page_sizes]
    engine = replace(ENGINE, dtype=dtype, kv_cache_dtype=cache_dtype)
    async with in_process_server(path, loaded, workers, engine=engine, page_sizes=page_sizes) as server:
        answers = await server.generate_all(requests)
        await server.assert_no_leaks()
    return answers


@pytest.mark.parametrize("dtype", [KVDType.FLOAT32, KVDType.BFLOAT16], ids=lambda dtype: dtype.value)
async def test_attention_does_not_depend_on_the_page_size(path: Path, requests: list[GenerateRequest], dtype: KVDType) -> None:
    loaded = load_model(path, dtype=dtype)
    sizes = (*PAGE_SIZES, 24)
    first, *others = [await answers_of(path, loaded, requests, {"colocated-0": size}, dtype=dtype) for size in sizes]
    for other in others:
        assert other == first  # log probabilities too, bit for bit


@pytest.mark.parametrize(
    "page_sizes", tuple(itertools.product(PAGE_SIZES, repeat=2)), ids=lambda sizes: "to".join(map(str, sizes))
)
async def test_split_equals_unsplit(
    path: Path,
    loaded: LoadedModel,
    requests: list[GenerateRequest],
    unsplit: list[Answer],
    page_sizes: tuple[int, int],
) -> None:
    split = await answers_of(path, loaded, requests, {"prefill-0": page_sizes[0], "decode-0": page_sizes[1]})
    assert [answer.token_ids for answer in split] == [answer.token_ids for answer in unsplit]
    assert split == unsplit


@pytest.mark.parametrize("dtype", [KVDType.FLOAT32, KVDType.BFLOAT16], ids=lambda dtype: dtype.value)
async def test_scales_go_with_their_numbers(path: Path, requests: list[GenerateRequest], dtype: KVDType) -> None:
    loaded = load_model(path, dtype=dtype)
    one, *pairs = [
        await answers_of(path, loaded, requests, page_sizes, dtype=dtype, cache_dtype=KVDType.INT8)
        for page_sizes in ({"colocated-0": 16}, {"prefill-0": 8, "decode-0": 32}, {"prefill-0": 32, "decode-0": 16})
    ]
    for pair in pairs:
        assert pair == one
