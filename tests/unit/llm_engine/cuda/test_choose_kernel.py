"""Which kernel is taken, and what the log says of the others."""

from __future__ import annotations

import logging

import pytest
import torch

from llm_engine.cuda.choose_kernel import choose_kernel, cuda_arithmetic, obstacle_of_2, obstacle_of_4, pick_kernel
from llm_engine.cuda.paged_kernel import PagedKernel
from llm_engine.cuda.plain_paged_kernel import PlainPagedKernel


def missing() -> PagedKernel:
    raise ModuleNotFoundError("No module named 'flash_attn'")


def test_the_first_that_can_be_had_is_taken_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kernel = pick_kernel((("it is too old", missing), (None, PlainPagedKernel)), device_name="Some GPU")
    assert isinstance(kernel, PlainPagedKernel)
    assert [record.getMessage() for record in caplog.records] == ["Some GPU attends with plain (it is too old)"]


def test_without_any_torch_attends_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert pick_kernel((("it is too old", missing), (None, missing)), device_name="Some GPU") is None
    assert [record.getMessage() for record in caplog.records] == [
        "Some GPU attends with torch, which is slower (it is too old; No module named 'flash_attn')"
    ]


@pytest.mark.parametrize(
    ("major", "head_dim", "dtype", "of_4", "of_2"),
    [
        (9, 128, torch.bfloat16, None, None),
        (9, 256, torch.float16, None, None),
        (10, 128, torch.bfloat16, None, None),
        (10, 192, torch.bfloat16, "not 192", None),
        (8, 128, torch.bfloat16, "this is 8", None),
        (12, 128, torch.bfloat16, "this is 12", None),
        (7, 128, torch.float16, "this is 7", "this is 7"),
        (9, 128, torch.float32, "not float32", "not float32"),
        (9, 20, torch.bfloat16, "not 20", "not 20"),
        (9, 512, torch.bfloat16, "not 512", "not 512"),
    ],
)
def test_what_a_kernel_cannot_do_is_known_before_it_is_asked(
    major: int, head_dim: int, dtype: torch.dtype, of_4: str | None, of_2: str | None
) -> None:
    for obstacle, expected in ((obstacle_of_4(dtype, head_dim, major), of_4), (obstacle_of_2(dtype, head_dim, major), of_2)):
        assert (obstacle is None) == (expected is None)
        assert expected is None or obstacle is None or expected in obstacle


def test_a_device_with_nothing_installed_attends_with_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert choose_kernel(device, torch.float32, 64) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "Some GPU (compute capability 8.0) attends with torch, which is slower (flash-attn-4 reads pages on compute capability "
        "9 to 11, and this is 8; flash-attn computes in bfloat16 or float16, not float32)"
    )
    assert cuda_arithmetic(device, "float32", None) == f"Some GPU, torch {torch.__version__}, float32, attention by torch"
    assert cuda_arithmetic(device, "auto", PlainPagedKernel()).endswith("attention by plain")
