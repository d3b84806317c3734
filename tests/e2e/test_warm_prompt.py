"""``--warm-prompt`` on a real server: the first client that begins so hits the cache, after a worker's restart as well."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import LEASE_S, SERVER_FLAGS
from tests.e2e.server_process import MODEL, ServerProcess, serving, wait_until

pytestmark = pytest.mark.e2e

RULES = "Rule {}: the clerk of the harbour writes down every ship, its load and its master, and never guesses. "
SYSTEM = "".join(RULES.format(number) for number in range(14))


def num_cached(server: ServerProcess, question: str) -> int:
    """Tokens of the prompt that were not computed for the first answer to this question."""
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "max_tokens": 4,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def replace_worker(server: ServerProcess, worker_id: str) -> None:
    """Kill it, and wait until a new process serves."""
    old = server.workers()[worker_id]["incarnation"]
    server.signal_worker(worker_id, signal.SIGKILL)
    wait_until(lambda: server.is_replaced(worker_id, old), 60, f"{worker_id} to be back")
    server.wait_ready()


def decode_hits(server: ServerProcess) -> float:
    """Tokens that were not sent to the decode worker."""
    return server.metric("twinpool:prefix_cache_hits_total", role="decode")


def test_the_first_client_hits_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text(SYSTEM + "\n")
    with serving(tmp_path / "log", *SERVER_FLAGS, "--warm-prompt", str(file)) as server:
        # 1. after the start
        num_warm = num_cached(server, "Which ship came first?")
        assert num_warm > 256
        # 2. prefill computes them anew
        replace_worker(server, "prefill-0")
        assert num_cached(server, "Name the master.") == num_warm
        # 3. decode gets them anew, and then they are not sent to it
        replace_worker(server, "decode-0")
        assert num_cached(server, "12 tons of what?") == num_warm
        wait_until(lambda: decode_hits(server) >= num_warm, 10, "decode's hits")
        # 4. their pages are like any others
        wait_until(server.is_at_rest, 3 * LEASE_S, "all pages to be free or cached")
    assert "prefill-0 has the" in (tmp_path / "log").read_text()
