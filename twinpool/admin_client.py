"""Asks a running server's admin endpoints. Only the standard library, so that a command answers at once."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from serving_core.errors import ConfigError, TwinpoolError

TIMEOUT_S = 10.0


def get_admin_json(url: str, path: str, *, admin_key: str | None) -> dict[str, Any]:
    """The JSON object at ``path`` of the server at ``url``.

    Raises ``ConfigError`` when ``url`` is no http address, ``TwinpoolError`` when nothing answers there, or not with such an
    object.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r} is no address: write it like http://127.0.0.1:8000")
    request = urllib.request.Request(url.rstrip("/") + path)
    if admin_key is not None:
        request.add_header("authorization", f"Bearer {admin_key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        hint = " (give the key with --admin-key)" if error.code in (401, 403) else ""
        raise TwinpoolError(f"{url} answered {error.code} to {path}{hint}") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or reason
        raise TwinpoolError(f"no server answers at {url}: {why}") from error
    except ValueError as error:
        raise TwinpoolError(f"{url} is no Twinpool server: {path} holds no JSON") from error
    if not isinstance(answer, dict):
        raise TwinpoolError(f"{url} is no Twinpool server: {path} holds no JSON object")
    return answer
