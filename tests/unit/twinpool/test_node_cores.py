"""Cores of workers that run on nodes of a joined cluster."""

from __future__ import annotations

from twinpool.cli import make_parser
from twinpool.core_plan import CorePlan
from twinpool.serve_config import make_serve_config
from twinpool.worker_specs import plan_node_cores


def plan_of(*argv: str) -> CorePlan:
    config = make_serve_config(make_parser().parse_args(["serve", "--address", "auto", *argv]))
    return plan_node_cores(config, 8)


def test_each_worker_uses_its_share_and_nothing_is_pinned() -> None:
    plan = plan_of("--decode-workers", "2", "--prefill-workers", "3")
    assert plan == CorePlan(shared=(), decode=((), ()), decode_threads=8, prefill_threads=8)


def test_threads_that_were_asked_for_win() -> None:
    plan = plan_of("--threads", "4", "--prefill-threads", "2")
    assert (plan.decode_threads, plan.prefill_threads) == (4, 2)


def test_a_colocated_worker_is_one() -> None:
    assert plan_of("--colocated").decode == ((),)
