"""``twinpool status``: the workers of a running server as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from twinpool.admin_client import get_admin_json

_COLUMNS = ("id", "role", "state", "pid", "node", "address", "num_running", "num_waiting", "uptime_s")
_HEADINGS = ("WORKER", "ROLE", "STATE", "PID", "NODE", "ADDRESS", "RUNNING", "WAITING", "UPTIME")


def status_command(flags: argparse.Namespace) -> int:
    """Print the table, or the server's JSON. Returns 0 when at least one worker is ready, else 1."""
    answer = get_admin_json(flags.url, "/admin/workers", admin_key=flags.admin_key)
    workers: list[dict[str, Any]] = answer.get("workers", [])
    if flags.json:
        print(json.dumps(answer, indent=2))
    else:
        print(format_workers(workers))
    return 0 if any(worker.get("state") == "ready" for worker in workers) else 1


def format_workers(workers: Sequence[dict[str, Any]]) -> str:
    """One line a worker under a heading, columns as wide as their widest cell."""
    rows = [_HEADINGS, *(tuple(_cell(worker.get(column)) for column in _COLUMNS) for worker in workers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} s" if isinstance(value, float) else str(value)
