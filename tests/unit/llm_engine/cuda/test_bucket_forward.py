"""Decode steps in buckets, on the CPU with the definition of a kernel in the place of one: the same steps as one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm_engine.attention import TorchAttention
from llm_engine.cuda.bucket_forward import BucketForward
from llm_engine.cuda.buckets import bucket_of
from llm_engine.cuda.paged_attention import PagedAttention
from llm_engine.cuda.plain_paged_kernel import PlainPagedKernel
from llm_engine.forward import EagerForward, Forward
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel, load_model
from llm_engine.step_plan import PlanRow, StepPlan
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.tiny_model import write_tiny_gguf
from tests.unit.llm_engine.tiny_engine import greedy_spec

PAGE_SIZE, NUM_PAGES, PAGES_EACH = 16, 64, 4
PROMPTS = [[(7 * index + 3 * token) % 250 for token in range(length)] for index, length in enumerate([5, 17, 1, 33, 48, 16])]


class Recorder:
    """In the place of CUDA graphs: a replay computes again over the tensors that were there when it was recorded."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            compute()

        return replay


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return load_model(write_tiny_gguf(path), dtype=KVDType.FLOAT32)


class Sequences:
    """``PROMPTS`` in a cache of their own, whose logits come from a ``Forward``."""

    def __init__(self, loaded: LoadedModel, *, is_bucketed: bool, recorder: Recorder | None = None) -> None:
        config, decoder = loaded.config, loaded.phases[PhaseName.DECODE].decoder
        layout = config.page_layout(page_size=PAGE_SIZE, dtype=KVDType.FLOAT32)
        self.cache = KVCache(layout, NUM_PAGES, has_spare_page=is_bucketed)
        self.cache.tensor[:NUM_PAGES] = float("nan")
        scale, windows = config.attention_scale, [None] * config.num_layers
        self.forward: Forward
        if is_bucketed:
            attention = PagedAttention(self.cache, PlainPagedKernel(), scale=scale, sliding_windows=windows)
            ragged = EagerForward(decoder, attention, row_multiple=1)
            bucketed = BucketForward(decoder, attention, self.cache, num_table_pages=PAGES_EACH, ragged=ragged)
            if recorder is not None:
                bucketed.record(recorder, max_rows=4)
            self.forward = bucketed
        else:
            attention_by_torch = TorchAttention(self.cache, scale=scale, sliding_windows=windows)
            self.forward = EagerForward(decoder, attention_by_torch, row_multiple=4)
        self.token_ids = [list(prompt) for prompt in PROMPTS]
        self.num_fed = [0] * len(PROMPTS)
        self.step(*range(len(PROMPTS)), num_fed=[len(prompt) for prompt in PROMPTS])

    @torch.inference_mode()
    def step(self, *indices: int, num_fed: Sequence[int] | None = None, unsampled: Sequence[int] = ()) -> Tensor | None:
        """Feed each of the sequences its next token, or ``num_fed``. Returns the logits of those that sample."""
        rows = []
        for place, index in enumerate(indices):
            first = self.num_fed[index]
            self.num_fed[index] = end = first + (1 if num_fed is None else num_fed[place])
            pages = range(index * PAGES_EACH, index * PAGES_EACH + -(-end // PAGE_SIZE))
            rows.append(
                PlanRow(
                    key=SequenceKey(RequestId(str(index))),
                    token_ids=tuple(self.token_ids[index][first:end]),
                    start_position=first,
                    page_ids=tuple(map(PageId, pages)),
                    sample=None if index in unsampled else greedy_spec(),
                )
            )
        logits = self.forward.logits(StepPlan(phase=PhaseName.DECODE, rows=tuple(rows)))
        sampling = [index for index in indices if index not in unsampled]
        if logits is None:
            assert not sampling
            return None
        logits = logits[: len(sampling)].clone()
        for index, row in zip(sampling, logits, strict=True):
            self.token_ids[index].append(int(row.argmax()))
        return logits


STEPS: list[tuple[int, ...]] = [(0, 1, 2, 3, 4, 5), (5, 0, 3), (2,), (1, 4), (4, 3, 2, 1, 0), (0, 1, 2, 3, 4, 5), (3,)]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_buckets_compute_what_rows_one_by_one_do(loaded: LoadedModel, is_recorded: bool) -> None:
    recorder = Recorder() if is_recorded else None
    bucketed = Sequences(loaded, is_bucketed=True, recorder=recorder)
    plain = Sequences(loaded, is_bucketed=False)
    for indices in STEPS:
        expected, logits = plain.step(*indices), bucketed.step(*indices)
        assert expected is not None
        assert logits is not None
        assert torch.allclose(logits, expected, atol=1e-5)
    assert bucketed.token_ids == plain.token_ids
    if recorder is not None:
        assert recorder.num_recorded == 3, "for 1, 2 and 4 rows"
        assert recorder.num_replayed == sum(bucket_of(len(indices)) <= 4 for indices in STEPS)


def test_recorded_steps_have_the_same_bits(loaded: LoadedModel) -> None:
    recorded, unrecorded = (Sequences(loaded, is_bucketed=True, recorder=recorder) for recorder in (Recorder(), None))
    for indices in STEPS:
        ours, theirs = recorded.step(*indices), unrecorded.step(*indices)
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
    assert torch.equal(recorded.cache.tensor[:NUM_PAGES].nan_to_num(), unrecorded.cache.tensor[:NUM_PAGES].nan_to_num())


def test_padding_touches_the_spare_page_alone(loaded: LoadedModel) -> None:
    sequences = Sequences(loaded, is_bucketed=True)
    before = sequences.cache.tensor.nan_to_num()
    assert not before[NUM_PAGES].any()
    sequences.step(0, 1, 2, 3, 4)  # a bucket of eight
    after = sequences.cache.tensor.nan_to_num()
    changed = {page for page in range(NUM_PAGES + 1) if not before[page].equal(after[page])}
    written = {index * PAGES_EACH + len(PROMPTS[index]) // PAGE_SIZE for index in range(5)}
    assert changed == written | {NUM_PAGES}
    assert sequences.cache.tensor[NUM_PAGES].isfinite().all()


def test_rows_that_do_not_sample_have_no_logits(loaded: LoadedModel) -> None:
    ours, theirs = Sequences(loaded, is_bucketed=True), Sequences(loaded, is_bucketed=False)
    for sequences in (ours, theirs):
        for index in range(len(PROMPTS)):
            sequences.token_ids[index] += [9, 8]  # as in a replay
    expected, logits = theirs.step(3, 0, 1, unsampled=[0]), ours.step(3, 0, 1, unsampled=[0])
    assert expected is not None
    assert logits is not None
    assert torch.allclose(logits, expected, atol=1e-5)
    assert ours.step(2, unsampled=[2]) is None


def test_a_replayed_log_is_computed_beside_single_tokens(loaded: LoadedModel) -> None:
    ours, theirs = Sequences(loaded, is_bucketed=True), Sequences(loaded, is_bucketed=False)
    for sequences in (ours, theirs):
        sequences.token_ids[1] += [9, 8, 7]
    expected, logits = theirs.step(0, 1, num_fed=[1, 4]), ours.step(0, 1, num_fed=[1, 4])
    assert expected is not None
    assert logits is not None
    assert torch.allclose(logits, expected, atol=1e-5)


def test_neither_order_nor_neighbours_in_a_bucket_change_a_row(loaded: LoadedModel) -> None:
    straight, turned = Sequences(loaded, is_bucketed=True), Sequences(loaded, is_bucketed=True)
    ours, theirs = straight.step(0, 1, 2, 3), turned.step(3, 1, 5, 0)
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours[[0, 1, 3]], theirs[[3, 1, 0]])
