from __future__ import annotations

from dataclasses import replace

import pytest

from serving_core.errors import BrokenContract
from serving_core.kv_page_layout import KVDType, KVPageLayout

LAYOUT = KVPageLayout(num_layers=30, num_kv_heads=3, head_dim=64, page_size=16, dtype=KVDType.BFLOAT16)
NUM_ROWS = 30 * 2 * 16 * 3


@pytest.mark.parametrize(
    ("dtype", "row_bytes"),
    [(KVDType.FLOAT32, 256), (KVDType.BFLOAT16, 128), (KVDType.FLOAT16, 128), (KVDType.INT8, 64 + 4), (KVDType.FP8, 64 + 4)],
)
def test_bytes_are_those_of_numbers_and_scales(dtype: KVDType, row_bytes: int) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    assert layout.page_bytes == NUM_ROWS * row_bytes == layout.number_bytes + layout.scale_bytes
    assert layout.scale_bytes == (NUM_ROWS * 4 if dtype in (KVDType.INT8, KVDType.FP8) else 0)


@pytest.mark.parametrize(
    ("dtype", "layout_print"),
    [(KVDType.FLOAT32, "7d5e6934f533b0d6"), (KVDType.BFLOAT16, "1001d790a88f3d0e"), (KVDType.FLOAT16, "e28b02d108e770f0")],
)
def test_prints_stay_what_they_were(dtype: KVDType, layout_print: str) -> None:
    assert replace(LAYOUT, dtype=dtype).layout_print == layout_print


def test_prints_tell_every_field_apart() -> None:
    others = [
        *(replace(LAYOUT, dtype=dtype) for dtype in KVDType),
        *(replace(LAYOUT, num_layers=2), replace(LAYOUT, num_kv_heads=2), replace(LAYOUT, head_dim=2)),
        replace(LAYOUT, page_size=2),
    ]
    assert len({layout.layout_print for layout in others}) == len(others)


def test_scales_never_lie_askew() -> None:
    odd = KVPageLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=1, dtype=KVDType.BFLOAT16)
    with pytest.raises(BrokenContract, match="askew, after 2 bytes"):
        replace(odd, dtype=KVDType.INT8)
    assert replace(odd, dtype=KVDType.INT8, head_dim=2).page_bytes == 2 * 2 + 2 * 4


def test_obstacles_are_told_by_name_and_page_sizes_are_none() -> None:
    other = replace(LAYOUT, dtype=KVDType.INT8, page_size=32, num_layers=2)
    words = LAYOUT.obstacle_to(other, own_place="here", other_place="there")
    assert words == "num_layers is 30 here and 2 there, dtype is bfloat16 here and int8 there"
    assert LAYOUT.obstacle_to(replace(LAYOUT, page_size=32), own_place="here", other_place="there") == ""
