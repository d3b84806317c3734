from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from llm_engine.phase import finished
from llm_engine.step_plan import PlanRow, StepPlan
from serving_core.engine_config import Quantization
from serving_core.ids import RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.tiny_model import write_tiny_gguf
from tests.unit.llm_engine.tiny_engine import FedSequence, TinyEngine, greedy_spec, skip_without_kernels

PREFILL, DECODE = PhaseName.PREFILL, PhaseName.DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the steps of ``phase`` are computed."""

    dtype: KVDType
    phase: PhaseName = PREFILL
    quantization: Quantization = Quantization.NONE
    cache_dtype: KVDType | None = None

    def engine(self, path: Path, *, num_pages: int = 256) -> TinyEngine:
        if self.quantization is not Quantization.NONE:
            skip_without_kernels()
        return TinyEngine(
            path,
            self.dtype,
            num_pages=num_pages,
            cache_dtype=self.cache_dtype,
            prefill=self.quantization,
            decode=self.quantization,
        )


every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(dtype=KVDType.FLOAT32), id="float32"),
        pytest.param(Case(dtype=KVDType.BFLOAT16), id="bfloat16"),
        pytest.param(Case(dtype=KVDType.BFLOAT16, quantization=Quantization.INT8), id="prefill int8"),
        pytest.param(Case(dtype=KVDType.BFLOAT16, phase=DECODE, quantization=Quantization.AUTO), id="decode auto"),
        pytest.param(Case(dtype=KVDType.BFLOAT16, phase=DECODE, quantization=Quantization.INT8), id="decode int8"),
        pytest.param(Case(dtype=KVDType.BFLOAT16, phase=DECODE, quantization=Quantization.INT4), id="decode int4"),
        *(
            pytest.param(
                Case(dtype=dtype, phase=phase, quantization=quantization, cache_dtype=cache_dtype),
                id=f"{phase.value} {dtype.value} {quantization.value} over {cache_dtype.value}",
            )
            for dtype, quantization, cache_dtype in (
                (KVDType.FLOAT32, Quantization.NONE, KVDType.INT8),
                (KVDType.FLOAT32, Quantization.NONE, KVDType.BFLOAT16),
                (KVDType.BFLOAT16, Quantization.AUTO, KVDType.INT8),
                (KVDType.BFLOAT16, Quantization.AUTO, KVDType.FLOAT16),
            )
            for phase in PhaseName
        ),
    ],
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("runner") / "tiny.gguf")


def prompt_of(length: int, *, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(267), k=length)


def assert_equal_sequences(engine: TinyEngine, one: FedSequence, other: FedSequence) -> None:
    assert one.results[-1] == other.results[-1]
    assert torch.equal(engine.stored(one), engine.stored(other))


@every_case
def test_chunks_change_neither_logits_nor_pages(path: Path, case: Case) -> None:
    engine = case.engine(path)
    prompt = prompt_of(97)
    whole = engine.prefill(prompt, chunk=97, max_tokens=97, phase=case.phase)
    for chunk in (1, 7, 16, 32, 33, 96):
        assert_equal_sequences(engine, engine.prefill(prompt, chunk=chunk, max_tokens=97, phase=case.phase), whole)


@every_case
def test_other_rows_change_neither_logits_nor_pages(path: Path, case: Case) -> None:
    engine = case.engine(path, num_pages=512)
    prompts = [prompt_of(length) for length in (1, 15, 16, 17, 50)]

    def fresh() -> list[FedSequence]:
        return [engine.prefill(prompt, chunk=99, max_tokens=70, phase=case.phase) for prompt in prompts]

    alone, together, backwards = fresh(), fresh(), fresh()
    for index in range(10):
        for sequence in alone:
            engine.step((sequence, [index + 3]), phase=case.phase)
        engine.step(*[(sequence, [index + 3]) for sequence in together], phase=case.phase)
        engine.step(
            *[(sequence, [index + 3]) for sequence in backwards[::-1]],
            (engine.new_sequence(16), prompt_of(9)),
            phase=case.phase,
        )
    for one, two, three in zip(alone, together, backwards, strict=True):
        assert one.results == two.results == three.results
        assert_equal_sequences(engine, one, two)
        assert_equal_sequences(engine, one, three)


@every_case
def test_decoding_equals_prefilling_the_same_tokens(path: Path, case: Case) -> None:
    engine = case.engine(path)
    sequence = engine.prefill(prompt_of(20), chunk=99, max_tokens=60, phase=case.phase)
    tokens = prompt_of(20)
    for _ in range(30):
        tokens.append(sequence.results[-1].token_id)
        engine.step((sequence, tokens[-1:]), phase=case.phase)
    assert len(set(tokens[20:])) > 5, "the tiny model says something"
    assert_equal_sequences(engine, engine.prefill(tokens, chunk=99, max_tokens=60, phase=case.phase), sequence)


@pytest.mark.parametrize("phase", PhaseName)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(KVDType.FLOAT32, KVDType.INT8), (KVDType.BFLOAT16, KVDType.INT8), (KVDType.FLOAT32, KVDType.FLOAT16)],
)
def test_a_narrow_cache_moves_logprobs_a_little(path: Path, dtype: KVDType, cache_dtype: KVDType, phase: PhaseName) -> None:
    def logprobs(cache_dtype: KVDType) -> dict[int, float]:
        engine = TinyEngine(path, dtype, cache_dtype=cache_dtype)
        token = engine.prefill(prompt_of(60), chunk=60, max_tokens=60, phase=phase).results[-1]
        assert token.logprobs is not None
        return dict(token.logprobs.top)

    exact, narrow = logprobs(dtype), logprobs(cache_dtype)
    common = exact.keys() & narrow.keys()
    assert len(common) >= 15
    differences = [abs(exact[token_id] - narrow[token_id]) for token_id in common]
    assert 0 < max(differences) < 0.1


def test_a_row_without_a_sample_gets_no_token(path: Path) -> None:
    engine = TinyEngine(path, KVDType.FLOAT32)
    first, second = engine.new_sequence(16), engine.new_sequence(16)
    rows = tuple(
        PlanRow(key=sequence.key, token_ids=(1, 2, 3), start_position=0, page_ids=sequence.page_ids, sample=sample)
        for sequence, sample in ((first, None), (second, greedy_spec()))
    )
    result = finished(engine.runner.run(StepPlan(phase=PhaseName.PREFILL, rows=rows)))
    assert result.tokens[0] is None
    assert result.tokens[1] is not None
    assert result.failures == ()
    silent = finished(engine.runner.run(StepPlan(phase=PhaseName.PREFILL, rows=rows[:1])))
    assert silent.tokens == (None,)


def test_a_row_with_unusable_logits_fails_alone(path: Path) -> None:
    engine = TinyEngine(path, KVDType.FLOAT32)
    good, bad = engine.prefill([4, 5, 6], chunk=9, max_tokens=16), engine.prefill([4, 5, 6], chunk=9, max_tokens=16)
    expected = engine.prefill([4, 5, 6, 7], chunk=9, max_tokens=16).results[-1]
    engine.cache.tensor[bad.page_ids[0], :, :, 1] = float("nan")
    result = engine.step((bad, [7]), (good, [7]))
    assert result.tokens == (None, expected)
    assert result.failures[1] is None
    assert result.failures[0] is not None
    assert str(bad.key) in result.failures[0]
    assert "not finite" in result.failures[0]

    # 2. The pages it leaves behind do no harm to their next user.
    engine.cache.tensor[bad.page_ids[0]] = float("nan")
    heir = FedSequence(key=SequenceKey(RequestId("heir")), page_ids=bad.page_ids)
    engine.step((heir, [4, 5, 6, 7]))
    assert heir.results[-1] == expected


def test_sampling_depends_on_the_seed_and_the_place_alone(path: Path) -> None:
    engine = TinyEngine(path, KVDType.FLOAT32)
    spec = replace(greedy_spec(), temperature=1.0, seed=5)

    def draw(output_index: int, num_others: int) -> int:
        sequences = [engine.new_sequence(16) for _ in range(num_others + 1)]
        rows = tuple(
            PlanRow(
                key=sequence.key,
                token_ids=(8, 9),
                start_position=0,
                page_ids=sequence.page_ids,
                sample=replace(spec, output_index=output_index),
            )
            for sequence in sequences
        )
        tokens = finished(engine.runner.run(StepPlan(phase=PhaseName.DECODE, rows=rows))).tokens
        assert tokens[-1] is not None
        return tokens[-1].token_id

    drawn = [draw(index, 0) for index in range(12)]
    assert len(set(drawn)) > 3
    assert [draw(index, 3) for index in range(12)] == drawn
