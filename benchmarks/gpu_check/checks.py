"""Whether what a device computes is right: against torch, with and without graphs, in any order of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from benchmarks.gpu_check.fed_sequences import FedSequences
from benchmarks.gpu_check.subject import Subject
from llm_engine.forward import Forward
from llm_engine.kv_cache import KVCache
from serving_core.ids import PageId

MAX_ERROR = 0.1
"""Of logits, as a share of their spread. On a CPU, rounding to bfloat16 comes to 0.008 in the tiny model and to 0.028 with 32
layers; without the newest key of every row it is 0.7."""
_MAX_MARGIN = 8.0
"""In errors: a token may differ from the reference's where the two likeliest are as close as that."""
_NUM_STEPS = 8


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """``detail`` is what was found, in a few words."""

    name: str
    outcome: Outcome
    detail: str


def run_checks(subject: Subject, lengths: Sequence[int]) -> list[CheckResult]:
    """All checks, over prompts of ``lengths`` tokens."""
    checks = {
        "logits and greedy tokens against torch": _check_against_torch,
        "graphs on = graphs off": _check_graphs,
        "rows in another order": _check_order,
        "a row alone and in a batch": _check_batch_size,
        "pages through host memory": _check_pages,
    }
    return [_result(name, check, _Setting(subject, lengths)) for name, check in checks.items()]


class _Setting:
    """Fresh caches with the same prompts."""

    def __init__(self, subject: Subject, lengths: Sequence[int]) -> None:
        self.subject = subject
        self.lengths = list(lengths)
        self.everyone = list(range(len(lengths)))
        self._num_tokens_each = max(lengths) + _NUM_STEPS + 1

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def new_cache(self) -> KVCache:
        return self.subject.new_cache(self._num_tokens_each, self.num_rows)

    def new_sequences(self, cache: KVCache) -> FedSequences:
        return FedSequences.random(
            cache, self.lengths, num_tokens=self.subject.config.num_tokens, num_tokens_each=self._num_tokens_each
        )

    def prefilled(self, cache: KVCache, forward: Forward) -> tuple[FedSequences, Tensor]:
        """The prompts in the cache, and the logits after each."""
        sequences = self.new_sequences(cache)
        return sequences, sequences.step(forward, self.everyone, self.lengths)

    def decoded(self, *, max_graph_rows: int, order: Sequence[int]) -> list[Tensor]:
        """The logits of some greedy steps of these rows, in that order."""
        cache = self.new_cache()
        sequences, logits = self.prefilled(cache, self.subject.prefill(cache))
        _extend(sequences, self.everyone, logits)
        forward = self.subject.decode(cache, max_graph_rows=max_graph_rows)
        steps = []
        for _ in range(_NUM_STEPS):
            steps.append(sequences.step(forward, order).clone())
            _extend(sequences, order, steps[-1])
        return steps


def _check_against_torch(setting: _Setting) -> tuple[Outcome, str]:
    subject = setting.subject
    if subject.kernel is None:
        return Outcome.SKIPPED, "torch attends, as there is no kernel"
    reference_cache, cache = setting.new_cache(), setting.new_cache()
    reference = subject.by_torch(reference_cache)
    theirs, expected = setting.prefilled(reference_cache, reference)
    ours, logits = setting.prefilled(cache, subject.prefill(cache))
    decode = subject.decode(cache, max_graph_rows=0)
    errors, spreads, num_equal, num_far, num_all = [], [], 0, 0, 0
    for _ in range(_NUM_STEPS):
        error = float((logits - expected).square().mean().sqrt())
        errors.append(error)
        spreads.append(float(expected.std()))
        likeliest = expected.topk(2).values
        is_equal = logits.argmax(-1) == expected.argmax(-1)
        is_far = (likeliest[:, 0] - likeliest[:, 1]) > _MAX_MARGIN * error
        num_equal += int(is_equal.sum())
        num_far += int((is_far & ~is_equal).sum())
        num_all += len(is_equal)
        for sequences in (theirs, ours):  # both go on with the reference's tokens
            _extend(sequences, setting.everyone, expected)
        expected, logits = theirs.step(reference, setting.everyone), ours.step(decode, setting.everyone)
    share = max(error / spread for error, spread in zip(errors, spreads, strict=True))
    detail = f"largest error {share:.4f} of the spread, {num_equal} of {num_all} tokens equal, {num_far} wrong"
    is_right = share <= MAX_ERROR and num_far == 0
    return Outcome.PASSED if is_right else Outcome.FAILED, detail


def _check_graphs(setting: _Setting) -> tuple[Outcome, str]:
    if setting.subject.kernel is None:
        return Outcome.SKIPPED, "without a kernel there are no graphs"
    recorded = setting.decoded(max_graph_rows=setting.num_rows, order=setting.everyone)
    plain = setting.decoded(max_graph_rows=0, order=setting.everyone)
    return _bits(recorded, plain)


def _check_order(setting: _Setting) -> tuple[Outcome, str]:
    turned_order = setting.everyone[::-1]
    straight = setting.decoded(max_graph_rows=0, order=setting.everyone)
    turned = setting.decoded(max_graph_rows=0, order=turned_order)
    return _bits(straight, [step[turned_order] for step in turned])


def _check_batch_size(setting: _Setting) -> tuple[Outcome, str]:
    """No promise on CUDA, so never a failure: matrix products round differently with the number of rows."""
    together = setting.decoded(max_graph_rows=0, order=setting.everyone)
    alone = setting.decoded(max_graph_rows=0, order=[0])
    first = float((together[0][0] - alone[0][0]).abs().max())
    return Outcome.PASSED, "no bit differs" if first == 0.0 else f"logits differ by up to {first:.4f}, as is to be expected"


def _check_pages(setting: _Setting) -> tuple[Outcome, str]:
    cache = setting.new_cache()
    setting.prefilled(cache, setting.subject.prefill(cache))
    other = setting.new_cache()
    for page in map(PageId, range(cache.num_pages)):
        memory = cache.page_memory(page)
        half = len(memory) // 2
        other.write(page, 0, memory[:half])
        other.write(page, half, memory[half:])
    return _bits([cache.tensor[: cache.num_pages].float()], [other.tensor[: cache.num_pages].float()])


def _bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[Outcome, str]:
    if all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True)):
        return Outcome.PASSED, "no bit differs"
    largest = max(float((our - their).abs().max()) for our, their in zip(ours, theirs, strict=True))
    return Outcome.FAILED, f"they differ by up to {largest:.4g}"


def _extend(sequences: FedSequences, indices: Sequence[int], logits: Tensor) -> None:
    for index, token_id in zip(indices, logits.argmax(-1).tolist(), strict=True):
        sequences.token_ids[index].append(token_id)


def _result(name: str, check: Callable[[_Setting], tuple[Outcome, str]], setting: _Setting) -> CheckResult:
    outcome, detail = check(setting)
    return CheckResult(name=name, outcome=outcome, detail=detail)
