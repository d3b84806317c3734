"""A server that is killed cannot clean up: its processes end without it, and its files are known to be abandoned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.server_process import serving, wait_until
from tests.tiny_model import write_tiny_gguf
from twinpool.temp_folder import remove_abandoned_folders

pytestmark = pytest.mark.e2e


def test_nothing_is_left_of_a_killed_server(tmp_path: Path) -> None:
    with serving(tmp_path / "log", f"{write_tiny_gguf(tmp_path / 'tiny.gguf')}", "--colocated") as server:
        # 1. while it lives, nobody takes its files away
        remove_abandoned_folders(server.temp_root)
        (folder,) = server.temp_files()
        assert folder.stat().st_mode & 0o777 == 0o700, "no other account gets at Ray's files"
        # 2. killed: every process of it is gone soon, its files are still there
        server.remember_family()
        server.process.kill()
        wait_until(lambda: not server.survivors(), 5, "every process to be gone, its worker too")
        assert server.temp_files()
        # 3. the next server removes them
        remove_abandoned_folders(server.temp_root)
        assert not server.temp_files()
