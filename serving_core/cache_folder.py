"""Where files are kept that a later start would otherwise make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Ours in the user's cache, which need not exist. A relative ``XDG_CACHE_HOME`` is ignored, as the XDG specification has
    it. Raises ``RuntimeError`` for a user without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "twinpool"
