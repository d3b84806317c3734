"""How fast a device decodes and prefills, beside what its memory and arithmetic can do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.gpu_check.fed_sequences import FedSequences
from benchmarks.gpu_check.subject import Subject
from llm_engine.cuda.device_steps import DeviceSteps
from llm_engine.decoder_matrices import HEAD_MATRIX, decoder_matrices
from llm_engine.device import settle
from llm_engine.model_config import ModelConfig

_NUM_WARM_UPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured. ``context`` is the keys that each sequence has when decode begins. A copy of ``copy_bytes`` measures
    memory, a product of two square matrices of ``gemm_rows`` arithmetic."""

    decode_batches: tuple[int, ...]
    context: int
    num_steps: int
    prefill_lengths: tuple[int, ...]
    copy_bytes: int
    gemm_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``bytes_per_s`` read and written by a copy; ``flops_per_s`` of a product in bfloat16."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """``size`` is the batch of decode or the length of a prompt. ``share`` is of the limit: bytes of weights and keys for
    decode, operations for prefill."""

    size: int
    tokens_per_s: float
    share: float


def measure_limits(device: torch.device, sizes: Sizes) -> Limits:
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source), device, sizes.num_steps)
    left, right = (torch.randn(sizes.gemm_rows, sizes.gemm_rows, device=device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    gemm_s = _seconds(lambda: torch.mm(left, right, out=product), device, sizes.num_steps)
    return Limits(bytes_per_s=2 * sizes.copy_bytes / copy_s, flops_per_s=2 * sizes.gemm_rows**3 / gemm_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpeeds:
    """By batch. ``computed``: logits, which come to the host, without sampling. ``sampled``: drawn tokens, each step waited for
    before the next begins; ``ahead``: afterwards."""

    computed: tuple[Speed, ...]
    sampled: tuple[Speed, ...]
    ahead: tuple[Speed, ...]


def measure_decode(subject: Subject, sizes: Sizes, limits: Limits) -> DecodeSpeeds:
    """With graphs, where there is a kernel. The keys in the cache are random: no prompt is computed for them."""
    num_tokens_each = sizes.context + _NUM_WARM_UPS + sizes.num_steps
    largest = max(sizes.decode_batches)
    cache = subject.new_cache(num_tokens_each, largest)
    cache.tensor.normal_()
    forward = subject.decode(cache, max_graph_rows=largest)
    steps = DeviceSteps(forward, subject.device, is_ahead=True)
    computed: list[Speed] = []
    sampled: list[Speed] = []
    ahead: list[Speed] = []
    for batch in sizes.decode_batches:
        sequences = FedSequences.random(
            cache, [num_tokens_each] * batch, num_tokens=subject.config.num_tokens, num_tokens_each=num_tokens_each
        )
        key_bytes = batch * sizes.context * cache.layout.page_bytes / cache.layout.page_size
        num_bytes = 2 * sum(_num_weights(subject.config)) + key_bytes

        def speed(step_s: float, batch: int = batch, num_bytes: float = num_bytes) -> Speed:
            return Speed(size=batch, tokens_per_s=batch / step_s, share=num_bytes / step_s / limits.bytes_per_s)

        def decode(num_ahead: int, batch: int = batch, sequences: FedSequences = sequences) -> None:
            sequences.num_fed = [sizes.context] * batch
            sequences.decode(steps, range(batch), sizes.num_steps, num_ahead=num_ahead)

        sequences.num_fed = [sizes.context] * batch
        step_s = _seconds(lambda: sequences.step(forward, range(batch)), subject.device, sizes.num_steps)  # noqa: B023
        computed.append(speed(step_s))
        for num_ahead, speeds in ((0, sampled), (1, ahead)):
            decode_s = _seconds(lambda: decode(num_ahead), subject.device, 3)  # noqa: B023
            speeds.append(speed(decode_s / sizes.num_steps))
    return DecodeSpeeds(computed=tuple(computed), sampled=tuple(sampled), ahead=tuple(ahead))


def measure_prefill(subject: Subject, sizes: Sizes, limits: Limits) -> list[Speed]:
    """Each prompt as one step."""
    config = subject.config
    num_layer_weights, num_head_weights = _num_weights(config)
    speeds = []
    for length in sizes.prefill_lengths:
        cache = subject.new_cache(length, 1)
        forward = subject.prefill(cache)
        sequences = FedSequences.random(cache, [length], num_tokens=config.num_tokens, num_tokens_each=length)

        def prefill(sequences: FedSequences = sequences, length: int = length) -> None:
            sequences.num_fed = [0]
            sequences.step(forward, [0], [length])  # noqa: B023

        prompt_s = _seconds(prefill, subject.device, min(sizes.num_steps, 5))
        # a query meets half of the keys on average, once for its score and once for its value
        attention_flops = 4 * config.num_layers * config.num_heads * config.head_dim * length * (length + 1) / 2
        flops = 2 * (num_layer_weights * length + num_head_weights) + attention_flops
        speeds.append(Speed(size=length, tokens_per_s=length / prompt_s, share=flops / prompt_s / limits.flops_per_s))
    return speeds


def _num_weights(config: ModelConfig) -> tuple[int, int]:
    """Those of the layers' matrices, and those of the head."""
    sizes = {name: matrix.num_out * matrix.num_in for name, matrix in decoder_matrices(config).items()}
    head = sizes.pop(HEAD_MATRIX)
    return sum(sizes.values()), head


def _seconds(run: Callable[[], object], device: torch.device, num_runs: int) -> float:
    """The median time of one run, once the device is done with it."""
    for _ in range(_NUM_WARM_UPS):
        run()
    settle(device)
    return median(_once(run, device) for _ in range(num_runs))


def _once(run: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    settle(device)
    return time.perf_counter() - begin
