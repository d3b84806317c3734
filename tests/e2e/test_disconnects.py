"""Clients that leave at any moment leave nothing behind: no page, and no memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.conftest import SERVER_FLAGS
from tests.e2e.disconnects import visit_and_leave
from tests.e2e.server_memory import MAX_GROWTH_BYTES, ServerMemory, in_mib
from tests.e2e.server_process import ServerProcess, serving, until
from tests.e2e.streams import completion_body, http_client

pytestmark = pytest.mark.e2e


async def test_100_disconnects_at_random_moments(server: ServerProcess) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    async with http_client(server.url) as client:
        await visit_and_leave(client, 100, random.Random(seed))
        took_s = await until(server.is_at_rest, 5, f"all pages to be free or cached (seed {seed})")
        print(f"at rest after {took_s:.2f} s")
        answer = await client.post("/v1/completions", json=completion_body("Hello", max_tokens=4))
        assert answer.status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_500_disconnects_leave_no_memory(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with serving(tmp_path / "log", *SERVER_FLAGS) as server:
        memory = ServerMemory(server)
        async with http_client(server.url) as client:
            await visit_and_leave(client, 200, rng)
            await until(server.is_at_rest, 5, "all pages to be free or cached after 200")
            before = memory.resident_bytes()
            await visit_and_leave(client, 300, rng)
            took_s = await until(server.is_at_rest, 5, "all pages to be free or cached after 500")
            growth = {name: num_bytes - before[name] for name, num_bytes in memory.resident_bytes().items()}
        print(f"at rest after {took_s:.2f} s; growth in MiB", in_mib(growth))
        assert max(growth.values()) <= MAX_GROWTH_BYTES, growth
