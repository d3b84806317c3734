"""A worker's counts under their Prometheus names. Measures nothing itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llm_engine.phase import PhaseStatus
from llm_engine.phase_counters import PhaseCounters
from prefill_worker.handoff_counters import DurationHistogram, HandoffCounters
from serving_core import metric_names as names
from serving_core.errors import RefusalCode
from serving_core.metric_names import WORKER_METRICS, WorkerMetric
from serving_core.page_state import PageState
from serving_core.worker_status import MetricFamily, MetricSample


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """Everything a worker has counted, of all its phases, at one moment. ``refused_writes``: page writes by reason;
    ``page_streams``: page streams opened, by transport."""

    statuses: Sequence[PhaseStatus]
    counters: Sequence[PhaseCounters]
    pages: Mapping[PageState, int]
    refused_writes: Mapping[RefusalCode, int]
    handoffs: HandoffCounters
    page_streams: Mapping[str, int]


def make_families(counts: WorkerCounts) -> tuple[MetricFamily, ...]:
    """Every family of ``WORKER_METRICS``, in its order."""
    return tuple(
        MetricFamily(
            name=metric.name,
            documentation=metric.documentation,
            kind=metric.kind,
            samples=tuple(_samples(metric, counts)),
        )
        for metric in WORKER_METRICS
    )


def _samples(metric: WorkerMetric, counts: WorkerCounts) -> Iterator[MetricSample]:
    if metric.name == names.KV_TRANSFER_SECONDS:
        yield from _histogram(metric.name, counts.handoffs.transfer_s)
    elif metric.name == names.KV_TRANSFER_EXPOSED_SECONDS:
        yield from _histogram(metric.name, counts.handoffs.exposed_s)
    elif metric.name == names.PAGES:
        for state in PageState:
            yield _sample(metric.name, counts.pages[state], state=state.value)
    elif metric.name == names.KV_WRITES_REFUSED_TOTAL:
        for code in names.WRITE_REFUSAL_CODES:
            yield _sample(metric.name, counts.refused_writes.get(code, 0), code=code.name.lower())
    elif metric.name == names.REFUSALS_TOTAL:
        for code in RefusalCode:
            num_refusals = sum(counters.refusals[code] for counters in counts.counters)
            yield _sample(metric.name, num_refusals, code=code.name.lower())
    elif metric.name == names.KV_TRANSFER_STREAMS_TOTAL:
        for transport in names.TRANSPORTS:
            yield _sample(metric.name, counts.page_streams.get(transport, 0), transport=transport)
    elif metric.name == names.HANDOFFS_TOTAL:
        yield _sample(metric.name, counts.handoffs.num_acknowledged, result=names.ACKNOWLEDGED)
        yield _sample(metric.name, counts.handoffs.num_not_acknowledged, result=names.NOT_ACKNOWLEDGED)
    else:
        yield _sample(metric.name, _plain_value(metric.name, counts))


def _histogram(name: str, seconds: DurationHistogram) -> Iterator[MetricSample]:
    for bound, num_observed in seconds.cumulative():
        yield _sample(f"{name}_bucket", num_observed, le="+Inf" if math.isinf(bound) else f"{bound:g}")
    yield _sample(f"{name}_sum", seconds.total_s)
    yield _sample(f"{name}_count", seconds.num_observed)


def _plain_value(name: str, counts: WorkerCounts) -> float:
    return {
        names.NUM_REQUESTS_RUNNING: sum(status.num_running for status in counts.statuses),
        names.NUM_REQUESTS_WAITING: sum(status.num_waiting for status in counts.statuses),
        names.KV_CACHE_USAGE_PERC: 1 - _num_available_pages(counts) / sum(counts.pages.values()),
        names.NUM_PREEMPTIONS_TOTAL: sum(counters.num_preemptions for counters in counts.counters),
        names.PROMPT_TOKENS_TOTAL: sum(counters.num_prompt_tokens for counters in counts.counters),
        names.GENERATION_TOKENS_TOTAL: sum(counters.num_generation_tokens for counters in counts.counters),
        names.PREFIX_CACHE_QUERIES_TOTAL: sum(counters.num_prefix_queries for counters in counts.counters),
        names.PREFIX_CACHE_HITS_TOTAL: sum(counters.num_prefix_hits for counters in counts.counters),
        names.KV_TRANSFER_BYTES_TOTAL: sum(counters.num_kv_bytes for counters in counts.counters)
        + counts.handoffs.num_bytes_sent,
        names.LEASE_EXPIRED_TOTAL: sum(counters.num_leases_expired for counters in counts.counters),
    }[name]


def _num_available_pages(counts: WorkerCounts) -> int:
    return counts.pages[PageState.FREE] + counts.pages[PageState.CACHED]


def _sample(name: str, value: float, **labels: str) -> MetricSample:
    return MetricSample(name=name, labels=tuple(labels.items()), value=float(value))
