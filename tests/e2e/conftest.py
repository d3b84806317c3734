"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server_process import ServerProcess, serving, wait_until

LEASE_S = 3.0
WINDOW = 1024
SERVER_FLAGS = (
    *("--lease-seconds", f"{LEASE_S:g}"),
    *("--max-model-len", f"{WINDOW}"),
    *("--max-num-batched-tokens", "256"),  # a long prompt takes several chunks
)


@pytest.fixture(scope="session")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("server") / "log", *SERVER_FLAGS) as server:
        yield server


@pytest.fixture
def server(one_server: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server, ready and with all pages at rest before the test and after it."""
    one_server.wait_ready()
    yield one_server
    one_server.wait_ready()
    wait_until(one_server.is_at_rest, 3 * LEASE_S, "all pages to be free again")
