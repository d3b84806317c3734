"""Both adapters over stand-ins for the functions that they call, since the real ones need a CUDA device: that each argument
means what the documentation says it does. That the real ones compute it is asked in tests/gpu."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from llm_engine.cuda.paged_kernel import PagedKernel
from serving_core.kv_page_layout import KVDType
from tests.unit.llm_engine.attention_sequences import Sequences
from tests.unit.llm_engine.cuda import flash_functions


def _stand_in(name: str, **functions: Callable[..., object]) -> ModuleType:
    module = ModuleType(name)
    for function_name, function in functions.items():
        setattr(module, function_name, function)
    return module


@pytest.fixture(params=["flash_attn_2", "flash_attn_4"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PagedKernel:
    flash_attn = _stand_in(
        "flash_attn",
        flash_attn_with_kvcache=flash_functions.flash_attn_with_kvcache,
        flash_attn_varlen_func=flash_functions.flash_attn_varlen_func,
    )
    cute = _stand_in("flash_attn.cute", flash_attn_varlen_func=flash_functions.cute_flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.2.3")
    name = f"llm_engine.cuda.{request.param}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)  # nobody else may meet the one with the stand-ins
    made: PagedKernel = (module.FlashAttn2 if request.param == "flash_attn_2" else module.FlashAttn4)()
    return made


@pytest.mark.parametrize("sliding_window", [None, 1, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 1)])
def test_prompts_chunks_and_single_tokens(
    kernel: PagedKernel, sliding_window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    sequences = Sequences(
        [1, 40, 300],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dtype=KVDType.FLOAT32,
        sliding_window=sliding_window,
        page_size=256,
        head_dim=8,
        kernel=kernel,
    )
    expected = [sequences.by_definition(index) for index in range(3)]
    for index, output in enumerate(sequences.step((0, 0, 1), (1, 0, 40), (2, 0, 300))):
        assert torch.allclose(output.double(), expected[index], atol=1e-5)
    chunks = [sequences.step((2, first, end))[0] for first, end in pairwise([0, 15, 16, 257, 300])]
    assert torch.allclose(torch.cat(chunks).double(), expected[2], atol=1e-5)
    for index, output in enumerate(sequences.step((0, 0, 1), (1, 39, 40), (2, 299, 300))):
        assert torch.allclose(output.double(), expected[index][-1:], atol=1e-5)


def test_the_name_has_the_version(kernel: PagedKernel) -> None:
    assert kernel.name in ("flash-attn 1.2.3", "flash-attn-4 1.2.3")
    assert kernel.page_size % kernel.page_size_multiple == 0
