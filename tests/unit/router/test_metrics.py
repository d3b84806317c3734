"""``/metrics``: every series from the start, workers merged in, counters named as promised."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from router.metrics import RouterMetrics, WorkerMetrics
from serving_core.metric_names import (
    KV_TRANSFER_SECONDS,
    NUM_REQUESTS_RUNNING,
    PAGES,
    PROMPT_TOKENS_TOTAL,
    WORKER_METRICS,
    zero_family,
)
from serving_core.worker_status import MetricFamily, MetricSample

PROMISED = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("inter_token_latency_seconds_count", "e2e_request_latency_seconds_count", "request_success_total", "pages"),
    *("pd_decision_total", "kv_transfer_bytes_total", "kv_transfer_seconds_count", "lease_expired_total"),
    "kv_writes_refused_total",
)


def samples_of(metrics: RouterMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Value by name and labels, without model_name, which every sample has."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def one_sample(name: str, kind: str, value: float) -> MetricFamily:
    return MetricFamily(name=name, documentation="doc", kind=kind, samples=(MetricSample(name=name, labels=(), value=value),))


def test_everything_promised_is_there_from_the_start() -> None:
    samples = samples_of(RouterMetrics(model_name="tiny"))
    names = {name for name, _ in samples}
    assert {f"twinpool:{name}" for name in PROMISED} <= names
    assert all(value == 0 for (name, _), value in samples.items() if not name.endswith("_created"))


def test_workers_are_merged_under_their_labels() -> None:
    workers = (
        WorkerMetrics(
            worker_id="prefill-0",
            role="prefill",
            is_alive=True,
            families=(one_sample(PROMPT_TOKENS_TOTAL, "counter", 7), one_sample(NUM_REQUESTS_RUNNING, "gauge", 3)),
        ),
        WorkerMetrics(worker_id="decode-0", role="decode", is_alive=True, families=()),
    )
    samples = samples_of(RouterMetrics(model_name="tiny", workers=lambda: workers, num_waiting=lambda: 5))
    prefill, decode = labels(role="prefill", worker="prefill-0"), labels(role="decode", worker="decode-0")
    assert samples[PROMPT_TOKENS_TOTAL, prefill] == 7
    assert samples[PROMPT_TOKENS_TOTAL, decode] == 0
    assert samples[NUM_REQUESTS_RUNNING, prefill] == 3
    assert samples["twinpool:num_requests_waiting", labels(role="router", worker="router")] == 5
    assert samples[PAGES, decode | labels(state="quarantined")] == 0
    assert samples[f"{KV_TRANSFER_SECONDS}_bucket", prefill | labels(le="+Inf")] == 0


def test_a_dead_worker_keeps_its_counters_and_loses_its_gauges() -> None:
    families = (one_sample(PROMPT_TOKENS_TOTAL, "counter", 7), one_sample(NUM_REQUESTS_RUNNING, "gauge", 3))
    dead = WorkerMetrics(worker_id="prefill-0", role="prefill", is_alive=False, families=families)
    samples = samples_of(RouterMetrics(model_name="tiny", workers=lambda: (dead,)))
    worker = labels(role="prefill", worker="prefill-0")
    assert samples[PROMPT_TOKENS_TOTAL, worker] == 7
    assert samples[NUM_REQUESTS_RUNNING, worker] == 0


def test_own_measurements() -> None:
    metrics = RouterMetrics(model_name="tiny")
    metrics.observe_first_token(0.3)
    metrics.observe_inter_token(0.02)
    metrics.observe_finished("stop", 2.0, 10, 20)
    metrics.count_decision("pair", "two_pools")
    samples = samples_of(metrics)
    router = labels(role="router", worker="router")
    assert samples["twinpool:time_to_first_token_seconds_sum", router] == 0.3
    assert samples["twinpool:inter_token_latency_seconds_count", router] == 1
    assert samples["twinpool:e2e_request_latency_seconds_sum", router] == 2.0
    assert samples["twinpool:request_generation_tokens_sum", router] == 20
    assert samples["twinpool:request_success_total", router | labels(finished_reason="stop")] == 1
    assert samples["twinpool:pd_decision_total", router | labels(path="pair", reason="two_pools")] == 1


def test_zero_families_have_every_series() -> None:
    for metric in WORKER_METRICS:
        family = zero_family(metric)
        assert family.name == metric.name
        assert len(family.samples) == {"histogram": 16}.get(metric.kind, len(metric.label_values) or 1)
