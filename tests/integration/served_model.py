"""A model that in-process servers share, and requests for it: servers named by their workers' page sizes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llm_engine.load_model import LoadedModel, load_model
from serving_core.engine_config import EngineConfig
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.page_state import PageState
from serving_core.sampling_params import SamplingParams
from tests.integration.in_process_server import COLOCATED, DECODE, PREFILL, Answer, InProcessServer, in_process_server
from twinpool.transfer_way import TransferWay

NUM_TOKENS = 12
MAX_NUM_PROMPTS = 256
_PHASES = {"prefill": PREFILL, "decode": DECODE, "colocated": COLOCATED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Weights of ``dtype``, loaded once."""

    path: Path
    loaded: LoadedModel
    dtype: KVDType

    @classmethod
    def load(cls, path: Path, dtype: KVDType = KVDType.FLOAT32) -> ServedModel:
        return cls(path=path, loaded=load_model(path, dtype=dtype), dtype=dtype)

    @property
    def engine(self) -> EngineConfig:
        """Small, and with several chunks a prompt and several prompts a chunk."""
        return EngineConfig(
            dtype=self.dtype,
            page_size=16,
            max_model_len=512,
            max_num_seqs=64,
            max_num_batched_tokens=24,
            kv_cache_memory_bytes=64 << 20,
            num_threads=1,
        )

    @asynccontextmanager
    async def server(
        self,
        page_sizes: Mapping[str, int],
        *,
        engine: EngineConfig | None = None,
        transfer: TransferWay = TransferWay.AUTO,
        warm_prompts: Sequence[tuple[int, ...]] = (),
    ) -> AsyncIterator[InProcessServer]:
        """Of these workers: ``{"prefill-0": 8, "decode-0": 16}`` or ``{"colocated-0": 16}``. In the end all pages are free or
        cached."""
        workers = [(name, _PHASES[name.rpartition("-")[0]]) for name in page_sizes]
        async with in_process_server(
            self.path,
            self.loaded,
            workers,
            engine=engine or self.engine,
            page_sizes=page_sizes,
            transfer=transfer,
            warm_prompts=warm_prompts,
        ) as server:
            yield server
            await server.assert_no_leaks()

    async def answers(
        self, requests: Sequence[GenerateRequest], page_sizes: Mapping[str, int], *, engine: EngineConfig | None = None
    ) -> list[Answer]:
        """Of a new server, asked all at once."""
        async with self.server(page_sizes, engine=engine) as server:
            return await server.generate_all(requests)

    async def answers_without_cache(
        self, requests: Sequence[GenerateRequest], *, engine: EngineConfig | None = None
    ) -> list[Answer]:
        """Of one worker with both phases, which keeps nothing: what all others are compared with."""
        engine = replace(engine or self.engine, has_prefix_cache=False)
        async with self.server({"colocated-0": 16}, engine=engine) as server:
            answers = await server.generate_all(requests)
            assert (await server.workers["colocated-0"].read_pages(True)).counts[PageState.CACHED] == 0
        return answers


def make_prompt(number: int, length: int) -> tuple[int, ...]:
    """Differs in its first token from the prompts of all other numbers below ``MAX_NUM_PROMPTS``."""
    return tuple(3 + (number + 11 * index * (number % 7 + 1)) % MAX_NUM_PROMPTS for index in range(length))


def make_request(
    name: str, prompt: Sequence[int], *, temperature: float = 0.0, max_tokens: int = NUM_TOKENS, salt: bytes = b""
) -> GenerateRequest:
    """``max_tokens`` are what the answer has."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=7, num_logprobs=2, ignore_eos=True)
    key = SequenceKey(RequestId(name))
    return GenerateRequest(key=key, prompt_token_ids=tuple(prompt), sampling=sampling, cache_salt=salt)
