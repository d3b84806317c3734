"""What a worker tells a router about itself: once when it registers, then again and again."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from serving_core.ids import Incarnation, WorkerId
from serving_core.kv_page_layout import KVPageLayout


class PhaseName(enum.Enum):
    """A phase a worker has mounted."""

    PREFILL = "prefill"
    DECODE = "decode"


class Role(enum.Enum):
    """A worker's place in the pools, derived from its phases. The values are the words of ``/admin/workers``."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"

    @classmethod
    def of(cls, phases: frozenset[PhaseName]) -> Role:
        if phases == {PhaseName.PREFILL, PhaseName.DECODE}:
            return cls.COLOCATED
        (phase,) = phases
        return cls(phase.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """A worker's registration with one router. Fixed for the life of its process.

    ``address`` is HOST:PORT of its gRPC server. ``pids`` holds one process id per tensor-parallel rank, rank 0 first.
    ``model_print`` covers source weights, tokenizer, rope and adapter and must be equal everywhere; ``layout`` may differ
    between the phases once a transfer plan exists. ``prefill_arithmetic`` and ``decode_arithmetic`` name the kernels and the
    form of the weights that each phase computes with, empty for one that is not mounted: equal in all workers of a phase, since
    only then does one go on with the bits of another. ``max_prefill_tokens_per_step`` bounds one step's prompt tokens.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    phases: frozenset[PhaseName]
    address: str
    node: str
    pids: tuple[int, ...]
    tensor_parallel_size: int
    model_name: str
    model_print: str
    prefill_arithmetic: str
    decode_arithmetic: str
    layout: KVPageLayout
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_prefill_tokens_per_step: int

    @property
    def role(self) -> Role:
        return Role.of(self.phases)

    def arithmetic(self, phase: PhaseName) -> str:
        """The phase's own."""
        return self.prefill_arithmetic if phase is PhaseName.PREFILL else self.decode_arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSample:
    """One Prometheus sample without the labels the router adds (model_name, role, worker)."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """One Prometheus metric of a worker; ``kind`` is counter, gauge or histogram."""

    name: str
    documentation: str
    kind: str
    samples: tuple[MetricSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker's load at one moment. Advisory: correctness never depends on it."""

    num_running: int
    num_waiting: int
    is_draining: bool
    metrics: tuple[MetricFamily, ...] = ()
