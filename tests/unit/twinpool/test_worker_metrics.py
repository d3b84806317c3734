from __future__ import annotations

from collections import Counter

from llm_engine.phase import PhaseStatus
from llm_engine.phase_counters import PhaseCounters
from prefill_worker.handoff_counters import HandoffCounters
from serving_core.errors import RefusalCode
from serving_core.metric_names import WORKER_METRICS, zero_family
from serving_core.page_state import PageState
from twinpool.worker_metrics import WorkerCounts, make_families


def pages(**counts: int) -> dict[PageState, int]:
    return {state: counts.get(state.value, 0) for state in PageState}


def values(counts: WorkerCounts) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(sample.name, sample.labels): sample.value for family in make_families(counts) for sample in family.samples}


IDLE = WorkerCounts(
    statuses=[PhaseStatus(num_running=0, num_waiting=0)],
    counters=[PhaseCounters()],
    pages=pages(free=8),
    refused_writes={},
    handoffs=HandoffCounters(),
    page_streams={},
)


def test_a_fresh_worker_reports_every_series_at_zero() -> None:
    for family, metric in zip(make_families(IDLE), WORKER_METRICS, strict=True):
        zero = zero_family(metric)
        assert (family.name, family.kind, family.documentation) == (zero.name, zero.kind, zero.documentation)
        names = [(sample.name, sample.labels) for sample in family.samples]
        assert names == [(sample.name, sample.labels) for sample in zero.samples]
        is_pages = family.name == "twinpool:pages"
        assert sum(sample.value for sample in family.samples) == (8 if is_pages else 0)


def test_phases_are_summed() -> None:
    handoffs = HandoffCounters(num_bytes_sent=300, num_acknowledged=2, num_not_acknowledged=1)
    handoffs.transfer_s.observe(0.02)
    handoffs.transfer_s.observe(99.0)
    handoffs.exposed_s.observe(0.004)
    seen = values(
        WorkerCounts(
            statuses=[
                PhaseStatus(num_running=3, num_waiting=1),
                PhaseStatus(num_running=2, num_waiting=4),
            ],
            counters=[
                PhaseCounters(
                    num_generation_tokens=10,
                    num_kv_bytes=40,
                    num_leases_expired=1,
                    num_prefix_queries=5,
                    refusals=Counter({RefusalCode.DRAINING: 4}),
                ),
                PhaseCounters(
                    num_generation_tokens=2,
                    num_prompt_tokens=50,
                    num_prefix_queries=80,
                    num_prefix_hits=30,
                    num_leases_expired=2,
                    refusals=Counter({RefusalCode.DRAINING: 1, RefusalCode.TOO_LARGE: 1}),
                ),
            ],
            pages=pages(free=4, cached=2, used=1, sending=1),
            refused_writes=Counter({RefusalCode.STALE_ATTEMPT: 5}),
            handoffs=handoffs,
            page_streams={"shared_memory": 7},
        )
    )
    plain = {name.removeprefix("twinpool:"): value for (name, labels), value in seen.items() if not labels}
    assert plain == {
        "num_requests_running": 5,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 0.25,
        "num_preemptions_total": 0,
        "prompt_tokens_total": 50,
        "generation_tokens_total": 12,
        "prefix_cache_queries_total": 85,
        "prefix_cache_hits_total": 30,
        "kv_transfer_bytes_total": 340,
        "kv_transfer_seconds_sum": 99.02,
        "kv_transfer_seconds_count": 2,
        "kv_transfer_exposed_seconds_sum": 0.004,
        "kv_transfer_exposed_seconds_count": 1,
        "lease_expired_total": 3,
    }
    assert seen["twinpool:pages", (("state", "sending"),)] == 1
    assert seen["twinpool:kv_writes_refused_total", (("code", "stale_attempt"),)] == 5
    assert seen["twinpool:refusals_total", (("code", "draining"),)] == 5
    assert seen["twinpool:refusals_total", (("code", "too_large"),)] == 1
    assert seen["twinpool:kv_transfer_streams_total", (("transport", "shared_memory"),)] == 7
    assert seen["twinpool:kv_transfer_streams_total", (("transport", "grpc"),)] == 0
    assert seen["twinpool:handoffs_total", (("result", "acknowledged"),)] == 2
    assert seen["twinpool:handoffs_total", (("result", "not_acknowledged"),)] == 1
    assert seen["twinpool:kv_transfer_seconds_bucket", (("le", "0.01"),)] == 0
    assert seen["twinpool:kv_transfer_seconds_bucket", (("le", "0.025"),)] == 1
    assert seen["twinpool:kv_transfer_seconds_bucket", (("le", "+Inf"),)] == 2
    assert seen["twinpool:kv_transfer_exposed_seconds_bucket", (("le", "0.0025"),)] == 0
    assert seen["twinpool:kv_transfer_exposed_seconds_bucket", (("le", "0.005"),)] == 1
