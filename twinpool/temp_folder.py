"""The folder of files that live as long as one server, and the removal of those whose server was killed.

A server holds a lock on a file in its folder. The kernel lets go of it when the process ends, however it ends, so that the next
server can tell an abandoned folder from one in use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "twinpool-"
_LOCK = "lock"


class TempFolder:
    """A new folder in ``root``, for this account alone; ``remove`` is its end."""

    def __init__(self, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        unlocked = self.path / f"{_LOCK}.new"
        self._lock: int | None = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)  # nobody ever finds the lock unheld while we live

    def remove(self) -> None:
        """Delete it with all that is in it. Idempotent."""
        if self._lock is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def remove_abandoned_folders(root: Path) -> None:
    """Delete every folder in ``root`` whose server has ended without doing so. What cannot be deleted stays."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, another user's, or another server is deleting it
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
