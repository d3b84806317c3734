"""Where a server's cluster token comes from: drawn at each start, unless its environment has one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from serving_core.errors import ConfigError
from serving_core.rpc.cluster_token import ClusterToken

TOKEN_VARIABLE = "TWINPOOL_CLUSTER_TOKEN"
"""For tools that ask workers themselves; workers are told by their server, whatever their environment says."""

_FORM = re.compile(r"[A-Za-z0-9._~+/=-]{16,}")  # RFC 6750, and too long to be guessed


def server_token(environment: Mapping[str, str]) -> ClusterToken:
    """Raises ``ConfigError`` for one that no header can carry or that may be guessed. The message does not show it."""
    value = environment.get(TOKEN_VARIABLE)
    if value is None:
        return ClusterToken.draw()
    if not _FORM.fullmatch(value):
        raise ConfigError(
            f"{TOKEN_VARIABLE} has {len(value)} characters, but must be at least 16 letters, digits or any of ._~+/=- : "
            "leave it out, and one is drawn"
        )
    return ClusterToken(value)
