"""Settings for every test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("twinpool", deadline=None)  # a busy machine is no failure
settings.load_profile("twinpool")
