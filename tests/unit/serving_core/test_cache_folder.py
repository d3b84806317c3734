from __future__ import annotations

from pathlib import Path

import pytest

from serving_core.cache_folder import cache_folder


@pytest.mark.parametrize(
    ("xdg_cache_home", "folder"),
    [(None, "/home/me/.cache"), ("", "/home/me/.cache"), ("/cache", "/cache"), ("cache", "/home/me/.cache")],
)
def test_only_an_absolute_path_moves_it(xdg_cache_home: str | None, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg_cache_home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg_cache_home)
    assert cache_folder() == Path(folder, "twinpool")
