"""Workers and the server itself killed at random, again and again, under running streams: texts stay what they are undisturbed.

``TWINPOOL_NUM_KILLS`` sets how many (100 by default; for the soak, not for every run).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import ServerProcess, until
from tests.e2e.streams import Stream, http_client, run_stream

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(7200)]

NUM_KILLS = int(os.environ.get("TWINPOOL_NUM_KILLS", "100"))
NUM_STREAMS = 8
NUM_TOKENS = 48
MAX_HANG_S = 10.0
"""Beyond the restart itself."""
SERVER_FLAGS = (
    *("--lease-seconds", "3"),
    *("--max-model-len", "512"),
    *("--kv-cache-memory-bytes", "24MiB"),  # about 68 pages in bfloat16: the streams do not all fit at their longest
    *("--prefill-workers", "1", "--decode-workers", "2"),
)
PROMPTS = [f"Chapter {n}. " + "It was a quiet morning by the river. " * n for n in range(1, NUM_STREAMS + 1)]
VICTIMS = ("prefill-0", "decode-0", "decode-1", "router")


def options(n: int) -> dict[str, object]:
    return {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0 if n % 2 else 0.8, "seed": n}


async def read_all(client: httpx.AsyncClient) -> list[Stream]:
    streams = [Stream() for _ in PROMPTS]
    await asyncio.gather(
        *(run_stream(client, stream, PROMPTS[n], **options(n)) for n, stream in enumerate(streams)), return_exceptions=True
    )
    return streams


async def test_random_kills_under_eight_streams(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    server = ServerProcess(SERVER_FLAGS, tmp_path / "log")
    rows: dict[str, list[float]] = {victim: [] for victim in VICTIMS}
    try:
        server.wait_ready()
        async with http_client(server.url) as client:
            undisturbed = [stream.text for stream in await read_all(client)]
        for number in range(NUM_KILLS):
            victim = rng.choices(VICTIMS, weights=(3, 3, 3, 1))[0]
            async with http_client(server.url) as client:
                reading = asyncio.create_task(read_all(client))
                await asyncio.sleep(rng.uniform(0, 4))  # the kill's own moment: nothing waits for it
                killed_at = time.monotonic()
                if victim == "router":
                    server.remember_family()
                    server.process.kill()
                else:
                    worker = server.workers()[victim]
                    os.kill(worker["pid"], signal.SIGKILL)
                    restart_s = await until(
                        partial(server.is_replaced, victim, worker["incarnation"]), 60, f"{victim} to be back"
                    )
                async with asyncio.timeout(MAX_HANG_S + (0 if victim == "router" else NUM_STREAMS)):
                    streams = await reading
            if victim == "router":
                # its clients see the connection break; what they had is right, and nothing of the server is left behind
                server.kill()
                server = ServerProcess(SERVER_FLAGS, tmp_path / f"log-{number}")
                server.wait_ready()
                restart_s = time.monotonic() - killed_at
                for stream, text in zip(streams, undisturbed, strict=True):
                    assert text.startswith(stream.text)
            else:
                assert [stream.error for stream in streams] == [None] * NUM_STREAMS
                assert [stream.text for stream in streams] == undisturbed
                await until(server.is_at_rest, 9, "all pages to be free again")
            rows[victim].append(restart_s)
            over_s = time.monotonic() - killed_at
            print(f"{number + 1:3} {victim:10} restart {restart_s:.1f} s, all streams over {over_s:.1f} s after the kill")
        for victim, times in rows.items():
            if times:
                print(f"| {victim} | {len(times)} | {sorted(times)[len(times) // 2]:.1f} | {max(times):.1f} |")
    finally:
        server.kill()
