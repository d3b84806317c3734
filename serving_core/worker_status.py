"""What a worker tells a router about itself: once when it registers, then again and again."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from serving_core.errors import BrokenContract
from serving_core.ids import Incarnation, WorkerId, check_id
from serving_core.kv_page_layout import KVPageLayout
from serving_core.peer_address import check_address

_METRIC_KINDS = ("counter", "gauge", "histogram")
_METRIC_NAME = re.compile("[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")


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

    Invariants: ids are not empty, there is a phase and a process, and every number is at least 1.
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

    def __post_init__(self) -> None:
        check_id("worker's id", self.worker_id)
        check_id("worker's incarnation", self.incarnation)
        check_address(self.address)
        if not self.phases or not self.pids:
            raise BrokenContract(f"worker {self.worker_id} has {len(self.phases)} phases and {len(self.pids)} processes")
        counts = ("tensor_parallel_size", "num_pages", "max_model_len", "max_num_seqs", "max_prefill_tokens_per_step")
        for name in counts:
            if getattr(self, name) < 1:
                raise BrokenContract(f"{name} of worker {self.worker_id} is {getattr(self, name)} but must be at least 1")

    @property
    def role(self) -> Role:
        return Role.of(self.phases)

    def arithmetic(self, phase: PhaseName) -> str:
        """The phase's own."""
        return self.prefill_arithmetic if phase is PhaseName.PREFILL else self.decode_arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSample:
    """One Prometheus sample without the labels the router adds (model_name, role, worker). Its names are Prometheus' words."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    def __post_init__(self) -> None:
        _check_word("metric", _METRIC_NAME, self.name)
        for label, _ in self.labels:
            _check_word("label", _LABEL_NAME, label)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """One Prometheus metric of a worker; ``kind`` is counter, gauge or histogram."""

    name: str
    documentation: str
    kind: str
    samples: tuple[MetricSample, ...]

    def __post_init__(self) -> None:
        _check_word("metric", _METRIC_NAME, self.name)
        if self.kind not in _METRIC_KINDS:
            raise BrokenContract(f"metric {self.name} is of kind {self.kind[:40]!r} but must be of {', '.join(_METRIC_KINDS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker's load at one moment. Advisory: correctness never depends on it."""

    num_running: int
    num_waiting: int
    is_draining: bool
    metrics: tuple[MetricFamily, ...] = ()


def _check_word(what: str, pattern: re.Pattern[str], word: str) -> None:
    if not pattern.fullmatch(word):
        raise BrokenContract(f"a {what} has the name {word[:40]!r}, which Prometheus does not allow")
