from benchmarks.handoff_probe import HandoffTotals
from prefill_worker.handoff_counters import HandoffCounters
from router.metrics import RouterMetrics, WorkerMetrics
from serving_core.page_state import PageState
from twinpool.worker_metrics import WorkerCounts, make_families


def metrics_text(*workers: tuple[str, HandoffCounters]) -> str:
    reports = [
        WorkerMetrics(
            worker_id=f"{role}-{number}",
            role=role,
            is_alive=True,
            families=make_families(
                WorkerCounts(
                    statuses=[],
                    counters=[],
                    pages=dict.fromkeys(PageState, 1),
                    refused_writes={},
                    handoffs=handoffs,
                    page_streams={},
                )
            ),
        )
        for number, (role, handoffs) in enumerate(workers)
    ]
    return RouterMetrics(model_name="tiny", workers=lambda: reports).render().decode()


def counters(num_bytes: int, transfer_s: float, exposed_s: float) -> HandoffCounters:
    handoffs = HandoffCounters(num_acknowledged=1, num_not_acknowledged=5, num_bytes_sent=num_bytes)
    handoffs.transfer_s.observe(transfer_s)
    handoffs.exposed_s.observe(exposed_s)
    return handoffs


def test_prefill_workers_are_summed_and_others_left_out() -> None:
    text = metrics_text(
        ("prefill", counters(100, 0.5, 0.25)), ("prefill", counters(10, 1.5, 0.5)), ("decode", counters(1000, 9.0, 9.0))
    )
    totals = HandoffTotals.parse(text)
    assert totals == HandoffTotals(num_acknowledged=2, transfer_s=2.0, exposed_s=0.75, num_bytes=110)


def test_since() -> None:
    before = HandoffTotals(num_acknowledged=2, transfer_s=2.0, exposed_s=0.75, num_bytes=110)
    after = HandoffTotals(num_acknowledged=5, transfer_s=2.5, exposed_s=1.0, num_bytes=200)
    assert after.since(before) == HandoffTotals(num_acknowledged=3, transfer_s=0.5, exposed_s=0.25, num_bytes=90)
