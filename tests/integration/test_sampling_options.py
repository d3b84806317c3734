"""Every sampling option, on real weights: the pair gives what one worker gives, token 0 (made by prefill) included."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from llm_engine.load_model import LoadedModel, load_model
from router.tokenizer import read_tokenizer
from serving_core.engine_config import EngineConfig
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.sampling_params import SamplingParams
from serving_core.token_event import FinishReason
from tests.integration.in_process_server import COLOCATED, DECODE, PREFILL, Answer, in_process_server
from twinpool.model_source import DEFAULT_MODEL, find_model

PATH = find_model(DEFAULT_MODEL).path
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=1)
SEEDED = replace(GREEDY, temperature=1.0, seed=5)
ENGINE = EngineConfig(
    dtype=KVDType.FLOAT32,
    page_size=16,
    max_model_len=512,
    max_num_seqs=64,
    max_num_batched_tokens=64,
    kv_cache_memory_bytes=2**28,
    num_threads=1,
)


def ids_of(text: str) -> tuple[int, ...]:
    return read_tokenizer(PATH).encode(text, add_special_tokens=True)


PROMPT = ids_of("BANANA BANANA BANANA BANANA")


def request(name: str, sampling: SamplingParams, *, choice_index: int = 0) -> GenerateRequest:
    return GenerateRequest(key=SequenceKey(RequestId(name), choice_index), prompt_token_ids=PROMPT, sampling=sampling)


async def answers(loaded: LoadedModel, requests: list[GenerateRequest], *, is_pair: bool) -> dict[str, Answer]:
    workers = [("prefill-0", PREFILL), ("decode-0", DECODE)] if is_pair else [("colocated-0", COLOCATED)]
    async with in_process_server(PATH, loaded, workers, engine=ENGINE) as server:
        found = await server.generate_all(requests)
        await server.assert_no_leaks()
    return {str(each.key): answer for each, answer in zip(requests, found, strict=True)}


async def test_every_option_on_the_pair_and_on_one_worker() -> None:
    loaded = load_model(PATH, dtype=KVDType.FLOAT32)
    # 1. What comes without any option.
    plain = (await answers(loaded, [request("plain", GREEDY)], is_pair=True))["plain/0"]
    assert len(plain.token_ids) == NUM_TOKENS
    # 2. Every option, on the pair and on one worker with both phases.
    bans = tuple((token_id, -100.0) for token_id in dict.fromkeys(plain.token_ids))
    options = [
        request("plain", GREEDY),
        request("presence", replace(GREEDY, presence_penalty=2.0)),
        request("frequency", replace(GREEDY, frequency_penalty=2.0)),
        request("repetition", replace(GREEDY, repetition_penalty=3.0)),
        request("banned", replace(GREEDY, logit_bias=bans)),
        request("boosted", replace(GREEDY, logit_bias=((1000, 100.0),))),
        request("stopped", replace(GREEDY, stop_token_ids=plain.token_ids[:1])),
        request("stopped-later", replace(GREEDY, stop_token_ids=plain.token_ids[:1], min_tokens=3)),
        request("min-p", replace(SEEDED, min_p=0.2)),
        request("all", replace(SEEDED, min_p=0.01, presence_penalty=1.0, repetition_penalty=1.2, logit_bias=((198, -5.0),))),
        *(request("choices", SEEDED, choice_index=index) for index in range(3)),
    ]
    pair, one = await asyncio.gather(answers(loaded, options, is_pair=True), answers(loaded, options, is_pair=False))
    assert pair == one
    # 3. Each of them does what it says.
    assert pair["plain/0"] == plain
    for name in ("presence", "frequency", "repetition"):
        assert pair[f"{name}/0"].token_ids != plain.token_ids
    assert not set(pair["repetition/0"].token_ids) & set(PROMPT)
    assert not set(pair["banned/0"].token_ids) & set(plain.token_ids)
    assert set(pair["boosted/0"].token_ids) == {1000}
    assert pair["stopped/0"].token_ids == plain.token_ids[:1]
    assert pair["stopped/0"].finish_reason is FinishReason.STOP
    assert plain.token_ids[0] not in pair["stopped-later/0"].token_ids[:3]
    assert len({pair[f"choices/{index}"].token_ids for index in range(3)}) == 3, "each choice draws its own numbers"
    # 4. Logprobs are the model's own: a ban changes the token, not what the model thinks of the likeliest one.
    for each in (plain, pair["banned/0"], pair["boosted/0"]):
        assert each.logprobs[0] is not None
        assert plain.logprobs[0] is not None
        assert each.logprobs[0].top[0] == plain.logprobs[0].top[0]
