"""Where a server's cluster token comes from: drawn at each start, unless its environment has one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from serving_core.errors import ConfigError
from serving_core.rpc.cluster_token import ClusterToken

TOKEN_VARIABLE = "TWINPOOL_CLUSTER_TOKEN"
"""For tools that ask workers themselves; workers are told by their server, whatever their environment says."""

_FORM = re.compile(r"[A-Za-z0-9._~+/=-]*")  # RFC 6750
_MIN_LENGTH = 16  # too long to be guessed


def server_token(environment: Mapping[str, str]) -> ClusterToken:
    """Raises ``ConfigError`` for one that no header can carry or that may be guessed. The message does not show it."""
    value = environment.get(TOKEN_VARIABLE)
    if value is None:
        return ClusterToken.draw()
    if len(value) < _MIN_LENGTH:
        raise ConfigError(
            f"{TOKEN_VARIABLE} has {len(value)} characters, but must have {_MIN_LENGTH} at least: "
            "leave it out, and one is drawn"
        )
    if not _FORM.fullmatch(value):
        raise ConfigError(
            f"{TOKEN_VARIABLE} has other characters than letters, digits and ._~+/=- : leave it out, and one is drawn"
        )
    return ClusterToken(value)
