"""A server that is killed cannot clean up: its processes end without it, and its files are known to be abandoned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.server_process import serving, wait_until
from twinpool.temp_folder import remove_abandoned_folders

pytestmark = pytest.mark.e2e


def test_nothing_is_left_of_a_killed_server(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--colocated") as server:
        # 1. while it lives, nobody takes its files away
        remove_abandoned_folders(server.temp_root)
        assert server.temp_files()
        # 2. killed: every process of it is gone soon, its files are still there
        server.remember_family()
        server.process.kill()
        wait_until(lambda: not server.survivors(), 10, "every process to be gone")
        assert server.temp_files()
        # 3. the next server removes them
        remove_abandoned_folders(server.temp_root)
        assert not server.temp_files()
