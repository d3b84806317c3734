"""Where a peer's gRPC server is reached: HOST:PORT, with an IPv6 host in brackets."""

from __future__ import annotations

import re

from serving_core.errors import BrokenContract

MAX_PORT = 65535

_HOST_AND_PORT = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})", re.ASCII)


def check_address(address: str) -> None:
    """Raises ``BrokenContract`` for anything but HOST:PORT."""
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= MAX_PORT:
        raise BrokenContract(f"the address is {address[:100]!r} but must be HOST:PORT with a port from 1 to {MAX_PORT}")
