"""Steps begun ahead, on the CPU: the tokens of steps that are waited for one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llm_engine.cuda.bucket_forward import BucketForward
from llm_engine.cuda.device_steps import DeviceSteps
from llm_engine.cuda.paged_attention import PagedAttention
from llm_engine.cuda.plain_paged_kernel import PlainPagedKernel
from llm_engine.forward import EagerForward
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel, load_model
from llm_engine.phase import StepUnderWay, finished
from llm_engine.step_plan import NOT_YET_KNOWN, PlanRow, SampleSpec, StepPlan, StepResult
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.tiny_model import write_tiny_gguf

PAGE_SIZE, PAGES_EACH, NUM_STEPS = 16, 4, 10
PROMPTS = [[(7 * index + 3 * token) % 250 for token in range(length)] for index, length in enumerate([5, 17, 1, 33])]
DRAWN = SampleSpec(temperature=0.8, top_p=0.95, top_k=40, seed=5, choice_index=0, output_index=0, num_logprobs=2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return load_model(write_tiny_gguf(path), dtype=KVDType.FLOAT32)


class Texts:
    """``PROMPTS`` and their answers, on a device that is the CPU."""

    def __init__(self, loaded: LoadedModel, *, is_ahead: bool) -> None:
        config, decoder = loaded.config, loaded.phases[PhaseName.DECODE].decoder
        layout = config.page_layout(page_size=PAGE_SIZE, dtype=KVDType.FLOAT32)
        cache = KVCache(layout, PAGES_EACH * len(PROMPTS), has_spare_page=True)
        windows = [None] * config.num_layers
        attention = PagedAttention(cache, PlainPagedKernel(), scale=config.attention_scale, sliding_windows=windows)
        ragged = EagerForward(decoder, attention, row_multiple=1)
        forward = BucketForward(decoder, attention, cache, num_table_pages=PAGES_EACH, ragged=ragged)
        self._steps = DeviceSteps(forward, decoder.device, is_ahead=is_ahead)
        self.tokens: list[list[int]] = [list(prompt) for prompt in PROMPTS]
        self.num_planned = [0] * len(PROMPTS)

    @torch.inference_mode()
    def run(self, indices: Sequence[int], num_tokens: Sequence[int], *, sampled: bool = True) -> StepResult | StepUnderWay:
        rows = tuple(self._row(index, count, sampled=sampled) for index, count in zip(indices, num_tokens, strict=True))
        return self._steps.run(StepPlan(phase=PhaseName.DECODE, rows=rows))

    def apply(self, indices: Sequence[int], outcome: StepResult | StepUnderWay) -> None:
        for index, token in zip(indices, finished(outcome).tokens, strict=True):
            if token is not None:
                assert token.logprobs is not None
                self.tokens[index].append(token.token_id)

    def _row(self, index: int, num_tokens: int, *, sampled: bool) -> PlanRow:
        start = self.num_planned[index]
        self.num_planned[index] = end = start + num_tokens
        known = tuple(self.tokens[index][start:end])
        first_page = index * PAGES_EACH
        return PlanRow(
            key=SequenceKey(RequestId(str(index))),
            token_ids=known or (NOT_YET_KNOWN,),
            start_position=start,
            page_ids=tuple(map(PageId, range(first_page, first_page + -(-end // PAGE_SIZE)))),
            sample=replace(DRAWN, output_index=end - len(PROMPTS[index])) if sampled else None,
        )


def batch(step: int) -> list[int]:
    """Of changing size, and in changing order."""
    return [[0, 1, 2, 3], [3, 1, 0], [2, 0, 1, 3], [1]][step % 4]


def at_once(loaded: LoadedModel) -> list[list[int]]:
    texts = Texts(loaded, is_ahead=False)
    every = list(range(len(PROMPTS)))
    texts.apply(every, texts.run(every, list(map(len, PROMPTS))))
    for step in range(NUM_STEPS):
        texts.apply(batch(step), texts.run(batch(step), [1] * len(batch(step))))
    return texts.tokens


def test_steps_ahead_choose_the_same_tokens(loaded: LoadedModel) -> None:
    texts = Texts(loaded, is_ahead=True)
    every = list(range(len(PROMPTS)))
    before, outcome = every, texts.run(every, list(map(len, PROMPTS)))
    for step in range(NUM_STEPS):
        assert not isinstance(outcome, StepResult)
        # Who was not in the step before goes on from what is known.
        began = texts.run(batch(step), [1] * len(batch(step)))
        texts.apply(before, outcome)
        before, outcome = batch(step), began
    texts.apply(before, outcome)
    assert texts.tokens == at_once(loaded)


def test_a_log_is_replayed_ahead_of_tokens_not_yet_known(loaded: LoadedModel) -> None:
    expected = at_once(loaded)
    texts = Texts(loaded, is_ahead=True)
    texts.tokens = [list(tokens[:-2]) for tokens in expected]
    first = texts.run([0, 1], [3, 10], sampled=False)
    # Now one of them comes to its end and the other goes on, ragged.
    second = texts.run([0, 1], [len(expected[0]) - 2 - 3, 8])
    texts.apply([0, 1], first)
    third = texts.run([0], [1])
    texts.apply([0, 1], second)
    texts.apply([0], third)
    assert texts.tokens[0] == expected[0]
