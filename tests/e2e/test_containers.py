"""Router and workers in containers of their own on a private network: nothing may count on loopback."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.containers import Machine, NoContainers, base_image, private_network, running
from tests.e2e.server_process import MODEL, SMALL_CACHE, START_TIMEOUT_S, wait_until

pytestmark = pytest.mark.e2e

PORT = 8000
FLAGS = ("--max-model-len", "2048", *SMALL_CACHE)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """A Ray head that takes workers, and a router that has joined it."""
    try:
        image = base_image()
    except NoContainers as error:
        pytest.skip(str(error))
    token = secrets.token_hex(32)
    with private_network() as network:
        head = Machine(image, network, "head", ["deploy/worker_node"], RAY_AUTH_TOKEN=token)
        serve = ["deploy/router_node", "head:6379", "--host", "0.0.0.0", "--port", str(PORT), *FLAGS]
        router = Machine(image, network, "router", serve, RAY_AUTH_TOKEN=token)
        with running(head):
            wait_until(lambda: "Ray runtime started" in head.log(), 60, "the Ray head")
            with running(router):
                yield head, router


def test_the_pair_across_two_containers(machines: tuple[Machine, Machine]) -> None:
    head, router = machines
    url = f"http://{router.address}:{PORT}"
    # 1. the router's container serves, the workers are in the other one and known by its address
    wait_until(lambda: is_ready(url), START_TIMEOUT_S, "the server to be ready")
    workers = workers_of(url)
    assert {worker["role"] for worker in workers.values()} == {"prefill", "decode"}
    hosts = {worker["address"].rpartition(":")[0] for worker in workers.values()}
    assert hosts == {head.address}
    assert not any(ipaddress.ip_address(host).is_loopback for host in hosts)
    # 2. a request goes across the pair
    assert "Paris" in ask_for_a_capital(url)
    # 3. a killed worker comes back at an address of the cluster, as a new incarnation
    killed = workers["prefill-0"]
    head.kill_process(killed["pid"])
    wait_until(lambda: workers_of(url)["prefill-0"]["incarnation"] != killed["incarnation"], 30, "a new incarnation")
    assert "Paris" in ask_for_a_capital(url)
    assert workers_of(url)["prefill-0"]["address"].rpartition(":")[0] == head.address
    # 4. the router stops in order: its workers are gone, the cluster is still there
    assert router.stop() == 0
    wait_until(lambda: not any("WorkerActor" in command for command in head.processes()), 10, "the workers to be gone")
    assert head.is_running
    assert any("raylet" in command for command in head.processes())


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def workers_of(url: str) -> dict[str, dict[str, Any]]:
    return {worker["id"]: worker for worker in httpx.get(f"{url}/admin/workers").json()["workers"]}


def ask_for_a_capital(url: str) -> str:
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = httpx.post(
        f"{url}/v1/chat/completions", json={"model": MODEL, "messages": [question], "temperature": 0}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-twinpool-path"] == "pair"
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text
