"""What runs in the processes of a cluster with faults: one worker, or one router. No Ray: whoever starts them restarts them."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import NamedTuple

import twinpool.worker
from llm_engine.model_runner import ModelRunner
from llm_engine.phase import StepUnderWay
from llm_engine.step_plan import StepPlan, StepResult
from router.chat_template import read_chat_template
from router.router import Router
from router.tokenizer import read_tokenizer
from serving_core.rpc.cluster_token import ClusterToken
from tests.faults.network import Node
from twinpool.http_server import HttpServer
from twinpool.worker_spec import WorkerSpec
from twinpool.worker_thread import WorkerThread

LINK_PORT = 7000


class Pace(NamedTuple):
    """One worker's steps, shared with the test: how long each of them takes, and how many have begun."""

    step_s: Synchronized[float]
    num_begun: Synchronized[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """What the router is told. It serves HTTP at the Unix socket ``http_path``, which is in no network."""

    model: Path
    model_name: str
    lease_s: float
    token: ClusterToken
    http_path: Path


class PacedRunner(ModelRunner):
    """A model that takes its time, as a large one does."""

    pace: Pace

    def run(self, plan: StepPlan) -> StepResult | StepUnderWay:
        with self.pace.num_begun.get_lock():
            self.pace.num_begun.value += 1
        time.sleep(self.pace.step_s.value)
        return super().run(plan)


def run_worker(node: Node, spec: WorkerSpec, pace: Pace, log: Path) -> None:
    """Serve until killed."""
    _settle(node, log)
    PacedRunner.pace = pace
    twinpool.worker.ModelRunner = PacedRunner  # type: ignore[attr-defined]  # in this process alone
    thread = WorkerThread(spec)
    thread.start()
    thread.join()


def run_router(node: Node, spec: RouterSpec, log: Path) -> None:
    """Serve until killed."""
    _settle(node, log)
    asyncio.run(_serve_router(node, spec))


async def _serve_router(node: Node, spec: RouterSpec) -> None:
    router = Router(
        model_name=spec.model_name,
        tokenizer=read_tokenizer(spec.model),
        chat_template=read_chat_template(spec.model),
        lease_s=spec.lease_s,
        cluster_token=spec.token,
    )
    await router.start_link(node.address, LINK_PORT)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(spec.http_path))
    listener.listen()
    await HttpServer(router.app, listener).run()


def _settle(node: Node, log: Path) -> None:
    node.enter()
    logging.basicConfig(filename=log, level=logging.INFO, format=f"%(asctime)s {node.name}: %(message)s")
    threading.Thread(target=_end_with_test, daemon=True).start()


def _end_with_test() -> None:
    test = multiprocessing.parent_process()
    assert test is not None
    test.join()
    os._exit(1)
