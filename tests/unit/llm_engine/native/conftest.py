from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from llm_engine.native.library import NativeLibrary, load_library


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    library = load_library()
    if library is None:
        pytest.skip("needs a processor with AVX-512 BF16 and a C++ compiler")
    return library


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
