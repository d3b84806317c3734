"""One tiny random model for all tests that do not ask for another."""

from __future__ import annotations

import pytest

from tests.integration.served_model import ServedModel
from tests.tiny_model import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """In float32, with a number of KV heads that no two workers could share evenly."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return ServedModel.load(write_tiny_gguf(path, num_heads=6, num_kv_heads=3))
