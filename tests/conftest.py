"""Settings for every test."""

from __future__ import annotations

import gc
import os

from hypothesis import settings

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # broken connections are what many tests are about
settings.register_profile("twinpool", deadline=None)  # a busy machine is no failure
settings.load_profile("twinpool")


def pytest_collection_finish() -> None:
    """What was imported stays: no collection, of which tests ask for many, needs to look through it again."""
    gc.collect()
    gc.freeze()
