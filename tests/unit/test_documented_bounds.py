"""The times that docs/reliability.md promises are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from kv_transfer.outgoing_handoff import MAX_BROKEN_S
from router.attempt import CONFIRMATION_S
from router.registered_worker import MAX_SILENCE_S
from router.retry_budget import RetryPolicy
from serving_core.engine_config import EngineConfig
from serving_core.rpc.channel import KEEPALIVE_TIME_MS, PING_TIMEOUT_MS
from serving_core.rpc.lasting_server import POLL_S
from twinpool.router_link import MAX_BACK_OFF_S

TEXT = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
LEASE_S = float(next(str(field.default) for field in fields(EngineConfig) if field.name == "lease_s"))
BOUNDS_MS = {
    "lease_s": 1000 * LEASE_S,
    "KEEPALIVE_TIME_MS": KEEPALIVE_TIME_MS,
    "PING_TIMEOUT_MS": PING_TIMEOUT_MS,
    "POLL_S": 1000 * POLL_S,
    "MAX_BROKEN_S": 1000 * MAX_BROKEN_S,
    "CONFIRMATION_S": 1000 * CONFIRMATION_S,
    "MAX_BACK_OFF_S": 1000 * MAX_BACK_OFF_S,
    "max_pause_s": 1000 * RetryPolicy().max_pause_s,
    "MAX_SILENCE_S": 1000 * MAX_SILENCE_S,
}


def test_every_constant_is_what_its_row_says() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` in \[\w+\]\(\S+?\)[^|]*\| (\d+) \|", TEXT, re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == BOUNDS_MS


def test_every_constant_s_file_has_it() -> None:
    links = re.findall(r"^\| `(\w+)` in \[(\w+)\]\(\.\./(\S+)\)", TEXT, re.MULTILINE)
    assert len(links) == len(BOUNDS_MS)
    for name, title, path in links:
        file = Path(__file__).parents[2] / path
        assert (file.stem, name in file.read_text(encoding="utf-8")) == (title, True)


def test_the_table_of_phases_is_made_of_these() -> None:
    silence_ms = KEEPALIVE_TIME_MS + PING_TIMEOUT_MS
    made = {silence_ms, silence_ms + 1000 * MAX_BROKEN_S, 1000 * CONFIRMATION_S, 1000 * LEASE_S}
    table = TEXT[TEXT.index("| phase | the client leaves") : TEXT.index("What is kept is freed")]
    assert {float(number) for number in re.findall(r"(\d+) ms", table)} == made
