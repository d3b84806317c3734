"""The metrics that workers report to the routers: names, kinds and labels. The router adds model_name, role and worker.

A worker sends its families in ``WorkerStatus.metrics`` with ``name`` and ``kind`` as here. Samples of counters and gauges carry
the family's own name; those of a histogram end in ``_bucket`` (cumulative, label ``le``), ``_sum`` and ``_count``.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving_core.errors import RefusalCode
from serving_core.page_state import PageState
from serving_core.worker_status import MetricFamily, MetricSample

PREFIX = "twinpool:"

NUM_REQUESTS_RUNNING = PREFIX + "num_requests_running"
NUM_REQUESTS_WAITING = PREFIX + "num_requests_waiting"
KV_CACHE_USAGE_PERC = PREFIX + "kv_cache_usage_perc"
NUM_PREEMPTIONS_TOTAL = PREFIX + "num_preemptions_total"
PROMPT_TOKENS_TOTAL = PREFIX + "prompt_tokens_total"
GENERATION_TOKENS_TOTAL = PREFIX + "generation_tokens_total"
PREFIX_CACHE_QUERIES_TOTAL = PREFIX + "prefix_cache_queries_total"
PREFIX_CACHE_HITS_TOTAL = PREFIX + "prefix_cache_hits_total"
PAGES = PREFIX + "pages"
KV_TRANSFER_BYTES_TOTAL = PREFIX + "kv_transfer_bytes_total"
KV_TRANSFER_STREAMS_TOTAL = PREFIX + "kv_transfer_streams_total"
KV_TRANSFER_SECONDS = PREFIX + "kv_transfer_seconds"
KV_TRANSFER_EXPOSED_SECONDS = PREFIX + "kv_transfer_exposed_seconds"
LEASE_EXPIRED_TOTAL = PREFIX + "lease_expired_total"
KV_WRITES_REFUSED_TOTAL = PREFIX + "kv_writes_refused_total"
REFUSALS_TOTAL = PREFIX + "refusals_total"
HANDOFFS_TOTAL = PREFIX + "handoffs_total"

KV_TRANSFER_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of both histograms in seconds, without the last one (``+Inf``)."""

WRITE_REFUSAL_CODES = (
    RefusalCode.STALE_ATTEMPT,
    RefusalCode.UNKNOWN_RESERVATION,
    RefusalCode.LEASE_EXPIRED,
    RefusalCode.CHECKSUM_MISMATCH,
    RefusalCode.MALFORMED,
)
"""What a page write can be refused for. As a label: the name in lower case."""

TRANSPORTS = ("grpc", "shared_memory", "torch_distributed")
"""The ways of pages to another worker."""

ACKNOWLEDGED, NOT_ACKNOWLEDGED = "acknowledged", "not_acknowledged"
"""How a hand-off to another worker can end: the decode worker took the sequence, or it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetric:
    """One family: ``kind`` is counter, gauge or histogram; ``label`` its only label, if any, with all of its values."""

    name: str
    kind: str
    documentation: str
    label: str | None = None
    label_values: tuple[str, ...] = ()


WORKER_METRICS = (
    WorkerMetric(name=NUM_REQUESTS_RUNNING, kind="gauge", documentation="Sequences being computed."),
    WorkerMetric(name=NUM_REQUESTS_WAITING, kind="gauge", documentation="Sequences waiting for their first step."),
    WorkerMetric(
        name=KV_CACHE_USAGE_PERC, kind="gauge", documentation="Share of KV pages that are neither free nor cached, 0 to 1."
    ),
    WorkerMetric(name=NUM_PREEMPTIONS_TOTAL, kind="counter", documentation="Sequences that had to give their pages up."),
    WorkerMetric(name=PROMPT_TOKENS_TOTAL, kind="counter", documentation="Prompt tokens computed."),
    WorkerMetric(name=GENERATION_TOKENS_TOTAL, kind="counter", documentation="Tokens generated."),
    WorkerMetric(
        name=PREFIX_CACHE_QUERIES_TOTAL, kind="counter", documentation="Prompt tokens looked for in the prefix cache."
    ),
    WorkerMetric(
        name=PREFIX_CACHE_HITS_TOTAL,
        kind="counter",
        documentation="Prompt tokens found there: not computed by prefill, not sent to decode.",
    ),
    WorkerMetric(
        name=PAGES,
        kind="gauge",
        documentation="KV pages by state.",
        label="state",
        label_values=tuple(state.value for state in PageState),
    ),
    WorkerMetric(
        name=KV_TRANSFER_BYTES_TOTAL, kind="counter", documentation="KV page bytes sent, those sent again too, or received."
    ),
    WorkerMetric(
        name=KV_TRANSFER_STREAMS_TOTAL,
        kind="counter",
        documentation="Page streams opened to other workers, by the transport that was taken.",
        label="transport",
        label_values=TRANSPORTS,
    ),
    WorkerMetric(
        name=KV_TRANSFER_SECONDS,
        kind="histogram",
        documentation="Seconds in which pages or commit of an acknowledged hand-off were under way, computing not counted.",
    ),
    WorkerMetric(
        name=KV_TRANSFER_EXPOSED_SECONDS,
        kind="histogram",
        documentation="Seconds from a prompt's last chunk to its acknowledged hand-off: what computing did not hide.",
    ),
    WorkerMetric(name=LEASE_EXPIRED_TOTAL, kind="counter", documentation="Sequences released because no router named them."),
    WorkerMetric(
        name=KV_WRITES_REFUSED_TOTAL,
        kind="counter",
        documentation="Page writes refused by this worker, by reason.",
        label="code",
        label_values=tuple(code.name.lower() for code in WRITE_REFUSAL_CODES),
    ),
    WorkerMetric(
        name=REFUSALS_TOTAL,
        kind="counter",
        documentation="Requests, commits and page writes declined by the phases of this worker, by reason.",
        label="code",
        label_values=tuple(code.name.lower() for code in RefusalCode),
    ),
    WorkerMetric(
        name=HANDOFFS_TOTAL,
        kind="counter",
        documentation="Hand-offs to other workers that have ended, by result.",
        label="result",
        label_values=(ACKNOWLEDGED, NOT_ACKNOWLEDGED),
    ),
)
"""Every worker metric, in the order of ``/metrics``."""


def zero_family(metric: WorkerMetric) -> MetricFamily:
    """The family of a worker that has counted nothing yet: every series is there, at zero."""
    if metric.kind == "histogram":
        bounds = (*(f"{bound:g}" for bound in KV_TRANSFER_SECONDS_BUCKETS), "+Inf")
        samples = (
            *(MetricSample(name=f"{metric.name}_bucket", labels=(("le", bound),), value=0.0) for bound in bounds),
            MetricSample(name=f"{metric.name}_sum", labels=(), value=0.0),
            MetricSample(name=f"{metric.name}_count", labels=(), value=0.0),
        )
    elif metric.label is not None:
        samples = tuple(
            MetricSample(name=metric.name, labels=((metric.label, value),), value=0.0) for value in metric.label_values
        )
    else:
        samples = (MetricSample(name=metric.name, labels=(), value=0.0),)
    return MetricFamily(name=metric.name, documentation=metric.documentation, kind=metric.kind, samples=samples)
