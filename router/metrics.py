"""What ``/metrics`` shows: the router's own measurements, and every worker's, merged under one set of labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric

from router.generation import Path
from router.placement import Reason
from serving_core.metric_names import NUM_REQUESTS_WAITING, PREFIX, WORKER_METRICS, WorkerMetric, zero_family
from serving_core.worker_status import MetricFamily

_LABELS = ("model_name", "role", "worker")
_ROUTER = "router"
_FINISH_REASONS = ("stop", "length", "abort", "error")
_DECISIONS = (
    (Path.PAIR, Reason.TWO_POOLS),
    (Path.PAIR, Reason.RETRY),
    (Path.PAIR, Reason.EVICTION),
    (Path.LOCAL, Reason.COLOCATED),
    (Path.LOCAL, Reason.RETRY),
    (Path.LOCAL, Reason.EVICTION),
)
_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    """What one known worker reported last; ``families`` is empty before its first report. ``is_alive``: neither starting nor
    dead."""

    worker_id: str
    role: str
    is_alive: bool
    families: tuple[MetricFamily, ...]


def _no_workers() -> Sequence[WorkerMetrics]:
    return ()


def _nobody_waits() -> int:
    return 0


class RouterMetrics:
    """The router's registry. ``workers`` and ``num_waiting`` (requests in the line) are read at each scrape."""

    def __init__(
        self,
        *,
        model_name: str,
        workers: Callable[[], Sequence[WorkerMetrics]] = _no_workers,
        num_waiting: Callable[[], int] = _nobody_waits,
    ) -> None:
        self._registry = CollectorRegistry()
        self._own = (model_name, _ROUTER, _ROUTER)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", _FIRST_TOKEN_BUCKETS_S
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of one answer.", _INTER_TOKEN_BUCKETS_S
        )
        self._request = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", _REQUEST_BUCKETS_S
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS)
        self._generation = self._histogram("request_generation_tokens", "Tokens generated for a request.", _TOKEN_BUCKETS)
        # prometheus_client appends _total to the names of counters by itself.
        self._finished = Counter(
            PREFIX + "request_success",
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._decisions = Counter(
            PREFIX + "pd_decision", "Placements, by path and reason.", (*_LABELS, "path", "reason"), registry=self._registry
        )
        for finish_reason in _FINISH_REASONS:
            self._finished.labels(*self._own, finish_reason)
        for path, reason in _DECISIONS:
            self._decisions.labels(*self._own, path.value, reason.value)
        self._registry.register(_WorkerCollector(model_name, workers, num_waiting))

    def observe_first_token(self, seconds: float) -> None:
        """A request's first token is on its way to the client, ``seconds`` after the request arrived."""
        self._first_token.observe(seconds)

    def observe_inter_token(self, seconds: float) -> None:
        """The next token of an answer came ``seconds`` after the one before."""
        self._inter_token.observe(seconds)

    def observe_finished(self, reason: str, e2e_seconds: float, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """A request ended: ``reason`` is stop, length, abort or error."""
        self._finished.labels(*self._own, reason).inc()
        self._request.observe(e2e_seconds)
        self._prompt.observe(num_prompt_tokens)
        self._generation.observe(num_generation_tokens)

    def count_decision(self, path: str, reason: str) -> None:
        """A sequence was placed; a new attempt counts again."""
        self._decisions.labels(*self._own, path, reason).inc()

    def render(self) -> bytes:
        """Everything in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(PREFIX + name, documentation, _LABELS, registry=self._registry, buckets=buckets)
        return family.labels(*self._own)


class _WorkerCollector:
    """Turns the workers' last reports into families. A known worker that reported nothing is there with zeros."""

    def __init__(self, model_name: str, workers: Callable[[], Sequence[WorkerMetrics]], num_waiting: Callable[[], int]) -> None:
        self._model_name = model_name
        self._workers = workers
        self._num_waiting = num_waiting

    def collect(self) -> Iterator[Metric]:
        workers = self._workers() or (WorkerMetrics(worker_id="", role="", is_alive=False, families=()),)
        for metric in WORKER_METRICS:
            family = _family(metric)
            for worker in workers:
                self._add(family, metric, worker)
            if metric.name == NUM_REQUESTS_WAITING:
                own = {"model_name": self._model_name, "role": _ROUTER, "worker": _ROUTER}
                family.add_sample(metric.name, own, self._num_waiting())
            yield family

    def _add(self, family: Metric, metric: WorkerMetric, worker: WorkerMetrics) -> None:
        reported = next((each for each in worker.families if each.name == metric.name), None)
        is_stale_gauge = metric.kind == "gauge" and not worker.is_alive  # a counter keeps its last value instead
        labels = {"model_name": self._model_name, "role": worker.role, "worker": worker.worker_id}
        for sample in (zero_family(metric) if reported is None or is_stale_gauge else reported).samples:
            family.add_sample(sample.name, {**dict(sample.labels), **labels}, sample.value)


def _family(metric: WorkerMetric) -> Metric:
    # The text format wants a counter's family without _total, and appends it again itself.
    return Metric(
        metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name, metric.documentation, metric.kind
    )
