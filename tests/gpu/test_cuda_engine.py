"""A tiny model on a CUDA device: against the CPU, with and without graphs, and its pages through host memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from llm_engine.device import CPU
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel, load_model
from llm_engine.model_runner import ModelRunner
from llm_engine.phase import StepUnderWay, finished
from llm_engine.step_plan import NOT_YET_KNOWN, PlanRow, StepPlan, StepResult
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.gpu.cuda_device import DEVICE, NEEDS_CUDA
from tests.tiny_model import write_tiny_gguf
from tests.unit.llm_engine.tiny_engine import greedy_spec

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]
PROMPTS = [[(7 * index + 3 * token) % 250 for token in range(length)] for index, length in enumerate([5, 300, 1, 33, 257])]
NUM_STEPS = 12


class Engine:
    """``PROMPTS`` on one runner, each in pages of its own."""

    def __init__(
        self, loaded: LoadedModel, *, max_graph_rows: int = 0, dtype: KVDType, has_async_scheduling: bool = False
    ) -> None:
        layout = loaded.config.page_layout(page_size=loaded.default_page_size, dtype=dtype)
        self._num_pages_each = layout.num_pages_for(max(map(len, PROMPTS)) + NUM_STEPS)
        num_pages = self._num_pages_each * len(PROMPTS)
        self.cache = KVCache(layout, num_pages, device=loaded.device, has_spare_page=loaded.device != CPU)
        self.runner = ModelRunner(
            loaded, self.cache, max_recorded_rows=max_graph_rows, has_async_scheduling=has_async_scheduling
        )
        self.token_ids = [list(prompt) for prompt in PROMPTS]

    def prefill(self) -> None:
        self._step(range(len(PROMPTS)), [0] * len(PROMPTS), PhaseName.PREFILL)

    def decode(self) -> list[list[int]]:
        """The greedy tokens, in batches of changing sizes."""
        for step in range(NUM_STEPS):
            indices = [index for index in range(len(PROMPTS)) if step % (index + 1) == 0 or step < 4]
            self._step(indices, [len(self.token_ids[index]) - 1 for index in indices], PhaseName.DECODE)
        return self.token_ids

    def decode_all(self, *, num_ahead: int) -> list[list[int]]:
        """The greedy tokens of all prompts, with so many steps begun before the first of them is waited for."""
        every = range(len(PROMPTS))
        starts = [len(ids) - 1 for ids in self.token_ids]
        under_way: list[StepResult | StepUnderWay] = []
        for step in range(NUM_STEPS):
            under_way.append(self._begin(every, [start + step for start in starts], PhaseName.DECODE))
            if len(under_way) > num_ahead:
                self._take(every, under_way.pop(0))
        for outcome in under_way:
            self._take(every, outcome)
        return self.token_ids

    def _step(self, indices: Sequence[int], starts: Sequence[int], phase: PhaseName) -> None:
        self._take(indices, self._begin(indices, starts, phase))

    def _begin(self, indices: Sequence[int], starts: Sequence[int], phase: PhaseName) -> StepResult | StepUnderWay:
        rows = []
        for index, start in zip(indices, starts, strict=True):
            token_ids = tuple(self.token_ids[index][start:]) or (NOT_YET_KNOWN,)
            first_page = index * self._num_pages_each
            num_pages = self.cache.layout.num_pages_for(start + len(token_ids))
            rows.append(
                PlanRow(
                    key=SequenceKey(RequestId(str(index))),
                    token_ids=token_ids,
                    start_position=start,
                    page_ids=tuple(map(PageId, range(first_page, first_page + num_pages))),
                    sample=greedy_spec(),
                )
            )
        return self.runner.run(StepPlan(phase=phase, rows=tuple(rows)))

    def _take(self, indices: Sequence[int], outcome: StepResult | StepUnderWay) -> None:
        for index, token in zip(indices, finished(outcome).tokens, strict=True):
            assert token is not None
            self.token_ids[index].append(token.token_id)


def test_float32_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    answers = []
    for device in (CPU, DEVICE):
        engine = Engine(load_model(path, dtype=KVDType.FLOAT32, device=device), dtype=KVDType.FLOAT32)
        engine.prefill()
        answers.append(engine.decode())
    assert answers[0] == answers[1]


@pytest.mark.parametrize("cache_dtype", [KVDType.FLOAT16, KVDType.INT8])
def test_other_types_of_the_cache_give_the_tokens_of_the_cpu(cache_dtype: KVDType, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    answers = []
    for device in (CPU, DEVICE):
        engine = Engine(load_model(path, dtype=KVDType.FLOAT32, device=device), dtype=cache_dtype)
        engine.prefill()
        answers.append(engine.decode())
    assert answers[0] == answers[1]


def test_fp8_answers_at_all(tmp_path: Path) -> None:
    engine = Engine(
        load_model(write_tiny_gguf(tmp_path / "tiny.gguf"), dtype=KVDType.BFLOAT16, device=DEVICE), dtype=KVDType.FP8
    )
    engine.prefill()
    assert all(len(ids) > len(prompt) for ids, prompt in zip(engine.decode(), PROMPTS, strict=True))


def test_graphs_change_no_token_and_no_bit_of_the_cache(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_gguf(tmp_path / "tiny.gguf"), dtype=KVDType.BFLOAT16, device=DEVICE)
    engines = [Engine(loaded, max_graph_rows=max_rows, dtype=KVDType.BFLOAT16) for max_rows in (0, 8)]
    answers = []
    for engine in engines:
        engine.prefill()
        answers.append(engine.decode())
    assert answers[0] == answers[1]
    plain, graphed = (engine.cache.tensor[: engine.cache.num_pages] for engine in engines)
    assert plain.equal(graphed)


@pytest.mark.parametrize("max_graph_rows", [0, 8])
def test_steps_ahead_change_no_token(max_graph_rows: int, tmp_path: Path) -> None:
    loaded = load_model(write_tiny_gguf(tmp_path / "tiny.gguf"), dtype=KVDType.BFLOAT16, device=DEVICE)
    answers = []
    for is_ahead in (False, True):
        engine = Engine(loaded, max_graph_rows=max_graph_rows, dtype=KVDType.BFLOAT16, has_async_scheduling=is_ahead)
        engine.prefill()
        answers.append(engine.decode_all(num_ahead=1 if is_ahead else 0))
    assert answers[0] == answers[1]


def test_pages_handed_over_byte_for_byte_go_on_alike(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_gguf(tmp_path / "tiny.gguf"), dtype=KVDType.BFLOAT16, device=DEVICE)
    sender, receiver = (Engine(loaded, dtype=KVDType.BFLOAT16) for _ in range(2))
    sender.prefill()
    for page in map(PageId, range(sender.cache.num_pages)):
        memory = sender.cache.page_memory(page)
        receiver.cache.write(page, 0, memory[:100])
        receiver.cache.write(page, 100, memory[100:])
    receiver.token_ids = [list(ids) for ids in sender.token_ids]
    assert receiver.decode() == sender.decode()
