"""Folders of servers that live, that ended, and that were killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from twinpool.temp_folder import TempFolder, remove_abandoned_folders

_MAKE_AND_BE_KILLED = """
import os, signal, sys
from pathlib import Path
from twinpool.temp_folder import TempFolder
folder = TempFolder(Path(sys.argv[1]))
(folder.path / "file").write_text("left")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_removed_with_its_files_once(tmp_path: Path) -> None:
    folder = TempFolder(tmp_path)
    (folder.path / "inner").mkdir()
    (folder.path / "inner" / "file").write_text("x")
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    # 1. one server lives, another one was killed, and two folders only look like a server's
    living = TempFolder(tmp_path)
    killed = subprocess.run(
        [sys.executable, "-c", _MAKE_AND_BE_KILLED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    abandoned = Path(killed.stdout.strip())
    assert (abandoned / "file").exists()
    unlocked = tmp_path / "twinpool-without-lock"
    unlocked.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "lock").touch()
    # 2. the next one starts
    remove_abandoned_folders(tmp_path)
    assert set(tmp_path.iterdir()) == {living.path, unlocked, other}
    living.remove()
